"""What vLLM's workers do besides: make room for the beams, answer remote calls about versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.engine.vllm_beams.decoder import BeamDecoder
from service.engine.vllm_beams.scratch import Scratch, ScratchError, enlarged
from service.engine.vllm_beams.snapshot import Snapshot

SCRATCH_BLOCKS = "gti_scratch_blocks"
"""Key of vLLM's ``additional_config``: KV blocks for beams."""


class BeamWorkerMixin:
    """In front of a vLLM worker class. Methods named ``gti_*`` are called from the service."""

    vllm_config: Any
    cache_config: Any
    model_runner: Any
    get_kv_cache_spec: Any

    def determine_available_memory(self) -> int:
        """As vLLM's, less what the beams' blocks take."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        page = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        left = available - int(page) * self._scratch_blocks
        if left <= 0:
            raise ScratchError(
                f"{self._scratch_blocks} scratch blocks of {page} bytes leave nothing of the "
                f"{available} bytes for prompts"
            )
        return left

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

    def gti_install(self, path: str) -> int:
        """Load a version's snapshot from a file. Returns its number."""
        snapshot = Snapshot.load(Path(path), self.model_runner.device)
        self.model_runner.get_model().pooler.install(snapshot)
        return snapshot.version

    def gti_discard(self, version: int) -> None:
        """Forget a version."""
        self.model_runner.get_model().pooler.discard(version)

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

    @property
    def _scratch_blocks(self) -> int:
        return int(self.vllm_config.additional_config[SCRATCH_BLOCKS])
