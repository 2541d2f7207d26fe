"""vLLM's CPU worker with room for beams."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from service.engine.vllm_beams.worker import BeamWorkerMixin


class GtiCPUWorker(BeamWorkerMixin, CPUWorker):  # type: ignore[misc]
    """See `service.engine.vllm_beams.worker`."""
