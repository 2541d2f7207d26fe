"""Entry point of group ``vllm.general_plugins``: what every vLLM process of ours needs."""

from __future__ import annotations


def register() -> None:
    """Register the classes by name; none is imported before a model asks for it."""
    import torch
    from vllm import ModelRegistry

    from service.engine.vllm_beams.wire import ARCHITECTURES

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES.values():
        if name not in known:
            ModelRegistry.register_model(name, f"service.engine.vllm_beams.models:{name}")
    # vLLM's attention in bfloat16 uses AMX tiles on a CPU without asking Linux for them: an illegal
    # instruction, unless a large matrix product has asked before. Does nothing without AMX.
    torch.cpu._init_amx()
