"""vLLM's CPU worker with room for beams."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from service.engine.vllm_beams.worker import BeamWorkerMixin


class GtiCPUWorker(BeamWorkerMixin, CPUWorker):  # type: ignore[misc]
    """See `service.engine.vllm_beams.worker`."""

    def init_device(self) -> None:
        """As vLLM's, with leave to use AMX."""
        # Its attention in bfloat16 uses AMX tiles without asking Linux for them: an illegal
        # instruction, unless a large matrix product has asked before. Does nothing without AMX.
        torch.cpu._init_amx()
        super().init_device()
