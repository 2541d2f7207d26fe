"""Entry point of group ``vllm.general_plugins``: every vLLM process knows the beam classes."""

from __future__ import annotations


def register() -> None:
    """Register the classes by name; none is imported before a model asks for it."""
    from vllm import ModelRegistry

    from service.engine.vllm_beams.wire import ARCHITECTURES

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES.values():
        if name not in known:
            ModelRegistry.register_model(name, f"service.engine.vllm_beams.models:{name}")
