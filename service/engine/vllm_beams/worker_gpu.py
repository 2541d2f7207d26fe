"""vLLM's GPU worker with room for beams."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from service.engine.vllm_beams.worker import BeamWorkerMixin


class GtiGPUWorker(BeamWorkerMixin, Worker):  # type: ignore[misc]
    """See `service.engine.vllm_beams.worker`."""
