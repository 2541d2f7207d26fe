"""What vLLM's workers do besides: make room for the beams, answer remote calls about versions."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from gti_core.vocabulary import SidVocabulary
from service.engine.live_rows import LiveRows
from service.engine.vllm_beams.decoder import BeamDecoder
from service.engine.vllm_beams.model import input_matrix, output_matrix
from service.engine.vllm_beams.scratch import Scratch, ScratchError, enlarged
from service.engine.vllm_beams.snapshot import Snapshot
from service.engine.vllm_beams.wire import SCRATCH_BLOCKS, rows_of

logger = logging.getLogger(__name__)


class BeamWorkerMixin:
    """In front of a vLLM worker class. Methods named ``gti_*`` are called from the service."""

    vllm_config: Any
    cache_config: Any
    model_runner: Any
    get_kv_cache_spec: Any

    _room: int | None = None
    _rows: LiveRows | None = None

    def determine_available_memory(self) -> int:
        """As vLLM's, less what the beams' blocks take: what was asked for, at most half."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        page = sum(int(spec.page_size_bytes) for spec in self.get_kv_cache_spec().values())
        asked = int(self.vllm_config.additional_config[SCRATCH_BLOCKS])
        self._room = min(asked, available // 2 // page)
        if self._room < 2:
            raise ScratchError(
                f"{available} bytes of KV cache are too few: two blocks for beams take {2 * page}"
            )
        if self._room < asked:
            logger.warning(
                "%d scratch blocks instead of %d, half of a KV cache of %d MiB; wide beams will "
                "run in parts",
                self._room,
                asked,
                available >> 20,
            )
        return available - page * self._room

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache with the beams' blocks behind those that vLLM schedules."""
        scheduled, scratch = kv_cache_config.num_blocks, self._scratch_blocks
        super().initialize_from_config(enlarged(kv_cache_config, scratch))  # type: ignore[misc]
        # vLLM reads its capacity here; the scheduler must not count the beams' blocks in.
        self.cache_config.num_gpu_blocks = scheduled
        (group,) = kv_cache_config.kv_cache_groups
        context = self.vllm_config.compilation_config.static_forward_context
        layers = {name: context[name] for name in group.layer_names}
        model = self.model_runner.get_model()
        room = Scratch(
            list(layers.values()), scheduled, scratch, int(group.kv_cache_spec.block_size)
        )
        model.pooler.attach(BeamDecoder(model, self.vllm_config, layers, room))

    def gti_install(self, path: str) -> list[int]:
        """Load a version's snapshot from a file. Returns its items and those in service."""
        return self._install(Snapshot.load(Path(path), self.model_runner.device))

    def gti_follow(
        self,
        version: int,
        parent: int,
        vocabulary_json: str,
        added: bytes,
        added_available: bytes,
        retired: list[int],
        restored: list[int],
    ) -> list[int]:
        """Make a version's snapshot from its parent's. Returns its items and those in service.

        Args:
            version: its number.
            parent: number of a version that is here.
            vocabulary_json: its vocabulary.
            added: SIDs of the catalogue rows appended, int32 [M, L].
            added_available: whether each of them is in service, bool [M].
            retired: catalogue rows that go out of service.
            restored: catalogue rows that come back into service.
        """
        before = self.model_runner.get_model().pooler.snapshot(parent)
        sids = np.frombuffer(added, np.int32).reshape(-1, before.levels)
        return self._install(
            before.followed(
                version,
                SidVocabulary.from_json(json.loads(vocabulary_json)),
                sids,
                np.frombuffer(added_available, np.bool_),
                retired,
                restored,
            )
        )

    def gti_discard(self, version: int) -> None:
        """Forget a version, if it is here; no request may ask for it any more."""
        self.model_runner.get_model().pooler.discard(version)

    def gti_write_rows(self, numbers: list[int], rows_in: bytes, rows_out: bytes | None) -> None:
        """Write SID rows into the weights in place. See `service.engine.live_rows.LiveRows.write`.

        Args:
            numbers: M rows inside the SID block.
            rows_in: input rows, float32 [M, D].
            rows_out: output rows, the same; None for tied models.
        """
        assert self._rows is not None  # a version was installed at start
        self._rows.write(rows_of(numbers, rows_in, rows_out))

    def gti_select(self, version: int, key: str, packed: bytes) -> None:
        """Make a selection of a version: one bit per catalogue row, numpy's ``packbits``."""
        snapshot = self.model_runner.get_model().pooler.snapshot(version)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=len(snapshot.index))
        snapshot.selections[key] = snapshot.index.selection(bits.astype(np.bool_))

    def gti_unselect(self, version: int, keys: list[str]) -> None:
        """Forget selections."""
        selections = self.model_runner.get_model().pooler.snapshot(version).selections
        for key in keys:
            selections.pop(key, None)

    def gti_state(self) -> dict[str, Any]:
        """Versions, counts of searches and failures, seconds by part, scratch blocks."""
        model = self.model_runner.get_model()
        pooler = model.pooler
        return {
            "seconds": model.clock.seconds(),
            "versions": pooler.versions,
            "searches": pooler.searches,
            "failures": pooler.failures,
            "scratch_blocks": self._scratch_blocks,
        }

    def _install(self, snapshot: Snapshot) -> list[int]:
        model = self.model_runner.get_model()
        if self._rows is None:
            self._rows = LiveRows(input_matrix(model), output_matrix(model), snapshot.vocabulary)
        self._rows.reach(snapshot.vocabulary)
        model.pooler.install(snapshot)
        return snapshot.counts

    @property
    def _scratch_blocks(self) -> int:
        if self._room is None:
            raise ScratchError("the KV cache is made before its size is known")
        return self._room
