"""The vLLM engine: one recommendation is one request, its beams run inside the worker.

The prompt goes through vLLM's own scheduler (continuous batching, chunked prefill, prefix cache,
abort); when its prefill ends, `service.engine.vllm_beams` runs the remaining levels and the items
come back as the request's result. docs/decisions/0006-in-engine-beams.md says how and why.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gti_core.bundle.delta import Rows
from gti_core.decoding import ScoredRow
from gti_core.types import JsonDict
from service.engine.base import (
    CatalogChange,
    DecodeRequest,
    EngineError,
    ServingModel,
    check_same_weights,
)
from service.engine.beam_gate import BeamGate
from service.engine.held_selections import HeldSelections
from service.engine.timings import Load
from service.engine.vllm_base import VllmProcess
from service.engine.vllm_beams.wire import (
    ARCHITECTURES,
    FAILED,
    SCRATCH_BLOCKS,
    BeamRequest,
    float32_bytes,
    read_times,
    write_snapshot,
)
from service.engine.vllm_start import TESTED_VERSIONS, VllmOptions, is_cpu_build

__all__ = ["TESTED_VERSIONS", "VllmEngine", "VllmOptions"]

CPU_WORKER = "service.engine.vllm_beams.worker_cpu.GtiCPUWorker"
GPU_WORKER = "service.engine.vllm_beams.worker_gpu.GtiGPUWorker"

_USUAL_WIDTH = 20
"""Beam width that the number of prompts in one step of vLLM is sized for."""


@dataclass(eq=False)
class _Version:
    """A version that the worker has. ``users`` are requests under way."""

    number: int
    selections: HeldSelections
    users: int = 0


class VllmEngine(VllmProcess):
    """Decodes inside vLLM's worker. See `service.engine.base.Engine`."""

    def __init__(self, model: ServingModel, options: VllmOptions | None = None) -> None:
        super().__init__(model, options)
        # One pool's worth is decoded in a step; as much again waits in vLLM for the next.
        self._gate = BeamGate(2 * self._options.scratch_blocks)
        self._versions: dict[int, _Version] = {}
        self._before: int | None = None
        """Number of the version that was current before: a way back that costs nothing."""
        self._publishing = asyncio.Lock()
        self._prompt_tokens = 0
        self._cached_tokens = 0

    @property
    def name(self) -> str:
        """``vllm``."""
        return "vllm"

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """Best items first. See `service.engine.base.Engine.decode`."""
        llm = self._running()
        request.timings.restart()
        self._check_prompt(request)
        self._check_search(request)
        version = self._versions.get(request.model.version)
        if version is None:
            raise EngineError(f"version {request.model.version} is not served any more")
        version.users += 1
        try:
            return await self._until_stopped(self._admitted(llm, version, request))
        finally:
            version.users -= 1
            self._forget_unused(llm)

    async def publish(
        self,
        model: ServingModel,
        *,
        rows: Rows | None = None,
        change: CatalogChange | None = None,
    ) -> None:
        """See `service.engine.base.Engine.publish`.

        The worker does its part between two steps; docs/decisions/0007-versions-in-the-engine.md
        says how long that takes.
        """
        llm = self._running()
        await self._until_stopped(self._publish(llm, model, rows, change))
        self._forget_unused(llm)

    def _check_search(self, request: DecodeRequest) -> None:
        """Refuse here what the worker could only answer with a failure."""
        if not 1 <= request.k <= request.beam_width:
            raise EngineError(f"beam_width {request.beam_width} must be at least k {request.k}")
        items = len(request.model.catalog)
        rows = request.excluded_rows | (request.included_rows or frozenset())
        foreign = [row for row in rows if not 0 <= row < items]
        if foreign:
            raise EngineError(f"there is no catalogue row {foreign[0]} among {items}")
        selection = request.selection
        if selection is not None and selection.mask.shape != (items,):
            raise EngineError(f"a selection of shape {selection.mask.shape} for {items} items")

    def in_flight(self) -> int:
        """Requests under way, those that wait for room included."""
        return super().in_flight() + self._gate.waiting

    def load(self) -> Load:
        """See `service.engine.base.Engine.load`. What waits inside vLLM counts as running."""
        return Load(super().in_flight(), self._gate.waiting)

    async def stop(self) -> None:
        """See `VllmProcess.stop`. Versions go with the worker that held them."""
        await super().stop()
        versions, self._versions = self._versions, {}
        for version in versions.values():
            version.selections.close()

    def info(self) -> JsonDict:
        """Facts about the engine, and prompt tokens so far, all and from the prefix cache."""
        return {
            **super().info(),
            "prompt_tokens": self._prompt_tokens,
            "cached_prompt_tokens": self._cached_tokens,
        }

    async def state(self) -> dict[str, Any]:
        """The worker's versions and counts of searches and failures."""
        return dict(await self._call(self._running(), "gti_state"))

    def _arguments(self) -> Mapping[str, Any]:
        architecture = _architecture(self._model.model_dir)
        return {
            "runner": "pooling",
            "hf_overrides": {"architectures": [ARCHITECTURES[architecture]]},
            "worker_cls": CPU_WORKER if is_cpu_build() else GPU_WORKER,
            "additional_config": {SCRATCH_BLOCKS: self._options.scratch_blocks},
            # All prompts that end in one step are decoded before the next one starts.
            "max_num_seqs": min(
                self._options.max_num_seqs, max(1, self._options.scratch_blocks // _USUAL_WIDTH)
            ),
        }

    async def _first_request(self, llm: Any) -> None:
        await self._install(llm, self._model, None)
        prompt = self._model.active_token_ids[:1]
        await self._ask(llm, DecodeRequest(self._model, "warm-up", prompt, 1, 1))

    async def _publish(
        self,
        llm: Any,
        model: ServingModel,
        rows: Rows | None,
        change: CatalogChange | None,
    ) -> None:
        async with self._publishing:
            check_same_weights(self._model, model)
            if rows is not None and len(rows):
                await self._write(llm, rows)
            if model.version not in self._versions:
                await self._install(llm, model, change)
            if model.version != self._model.version:
                self._before = self._model.version
            self._model = model

    async def _write(self, llm: Any, rows: Rows) -> None:
        """Write rows into the worker's weights."""
        outputs = None if rows.rows_out is None else float32_bytes(rows.rows_out)
        numbers = rows.numbers.tolist()
        await self._call(llm, "gti_write_rows", numbers, float32_bytes(rows.rows_in), outputs)

    async def _install(self, llm: Any, model: ServingModel, change: CatalogChange | None) -> None:
        """Give the worker a version: as a change of its parent, or whole."""
        try:
            if change is not None and change.parent in self._versions:
                found = await self._follow(llm, model, change)
            else:
                found = await self._load(llm, model)
            expected = [len(model.catalog), model.index.base.total]
            if list(found) != expected:
                raise EngineError(
                    f"version {model.version} has {expected} items and items in service, its "
                    f"change makes {found}"
                )
        except BaseException:
            # It may be in the worker all the same, also when this call was cancelled.
            self._spawn(self._call(llm, "gti_discard", model.version))
            raise
        selections = HeldSelections(model.version, partial(self._call, llm), self._keep)
        self._versions[model.version] = _Version(model.version, selections)

    async def _follow(self, llm: Any, model: ServingModel, change: CatalogChange) -> Any:
        return await self._call(
            llm,
            "gti_follow",
            model.version,
            change.parent,
            json.dumps(model.vocabulary.to_json()),
            np.asarray(change.added, dtype=np.int32).tobytes(),
            np.asarray(change.added_available, dtype=np.bool_).tobytes(),
            list(change.retired),
            list(change.restored),
        )

    async def _load(self, llm: Any, model: ServingModel) -> Any:
        with tempfile.TemporaryDirectory(prefix="gti-") as folder:
            path = Path(folder) / "snapshot.safetensors"
            try:
                await asyncio.to_thread(write_snapshot, path, model)
            except OSError as error:
                raise EngineError(f"a version can't be handed to the worker: {error}") from error
            return await self._call(llm, "gti_install", str(path))

    def _forget_unused(self, llm: Any) -> None:
        """Let the worker discard the versions that no request can ask for any more."""
        if self._llm is not None and self._unused():
            self._spawn(self._discard_unused(llm))

    def _unused(self) -> list[_Version]:
        kept = (self._model.version, self._before)
        return [v for v in self._versions.values() if not v.users and v.number not in kept]

    async def _discard_unused(self, llm: Any) -> None:
        async with self._publishing:  # no version becomes a parent meanwhile
            unused = self._unused()
            for version in unused:  # before anything is awaited: none may get a user meanwhile
                del self._versions[version.number]
            for version in unused:
                await self._call(llm, "gti_discard", version.number)

    async def _admitted(
        self, llm: Any, version: _Version, request: DecodeRequest
    ) -> list[ScoredRow]:
        """Ask once there is room for the beams and the worker has the request's selection."""
        async with (
            self._gate.enter(request.beam_width),
            version.selections.holding(request.selection),
        ):
            return await self._ask(llm, request)

    async def _ask(self, llm: Any, request: DecodeRequest) -> list[ScoredRow]:
        from vllm.inputs import tokens_input
        from vllm.pooling_params import PoolingParams

        wanted = BeamRequest(
            request.model.version,
            request.k,
            request.beam_width,
            sorted(request.excluded_rows),
            None if request.included_rows is None else sorted(request.included_rows),
            None if request.selection is None else request.selection.key,
        )
        params = PoolingParams(
            task="plugin", skip_reading_prefix_cache=False, extra_kwargs=wanted.to_params()
        )
        request_id = f"{request.request_id}-{next(self._serial)}"
        last = await self._last(
            llm.encode(tokens_input(list(request.prompt_token_ids)), params, request_id), request_id
        )
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += last.num_cached_tokens
        request.timings.prompt_tokens = len(request.prompt_token_ids)
        request.timings.cached_tokens = last.num_cached_tokens
        return self._rows(request, last.outputs.data)

    def _rows(self, request: DecodeRequest, answer: Any) -> list[ScoredRow]:
        found = []
        rows = answer.tolist()
        read_times(rows, request.timings)
        for row, score in rows:
            if row == FAILED or math.isnan(score):
                raise EngineError(
                    f"the search of request {request.request_id} failed inside the worker"
                )
            if row >= 0:
                item = request.model.catalog.items[int(row)]
                found.append(ScoredRow(int(row), item.sid, score))
        return found


def _architecture(model_dir: Path) -> str:
    """The model's architecture. Raises EngineError for one that can't decode beams."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_dir / 'config.json'} can't be read: {error}") from error
    for name in config.get("architectures") or ():
        if name in ARCHITECTURES:
            return str(name)
    raise EngineError(
        f"no beams inside the engine for {config.get('architectures')}; known: "
        f"{', '.join(ARCHITECTURES)}. Use the engine vllm-per-beam"
    )
