"""LoRA through peft: adapters on every linear layer of the backbone's blocks.

Attaching happens in place, so `SidLM` keeps its backbone; a state is the pair of matrices per
layer, named as in the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gti_core.errors import BundleError, UnsupportedModelError

_TARGETS = {
    # Llama, Qwen and their kin
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    # GPT-2 (c_attn, c_proj, c_fc), GPT-Neo (out_proj, c_fc, c_proj)
    "c_attn", "c_proj", "c_fc", "out_proj",
}  # fmt: skip


@dataclass(frozen=True)
class LoraOptions:
    """Paper's public run: r=8, alpha=32, dropout 0.05.

    Args:
        r: rank.
        alpha: scale; the update is ``alpha / r * B @ A``.
        dropout: on the adapter's input.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.05


def target_names(backbone: Any) -> list[str]:
    """Names of the linear layers that take an adapter. Raises UnsupportedModelError when none."""
    head = backbone.get_output_embeddings()
    found = sorted(
        {
            name.rsplit(".", 1)[-1]
            for name, module in backbone.named_modules()
            if module is not head and name.rsplit(".", 1)[-1] in _TARGETS
        }
    )
    if not found:
        raise UnsupportedModelError(f"no known linear layers in {type(backbone).__name__}")
    return found


def attach(backbone: nn.Module, options: LoraOptions, *, seed: int) -> None:
    """Freeze the backbone and put trainable float32 adapters into it, in place."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(seed)
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=target_names(backbone),
        fan_in_fan_out=type(backbone).__name__.startswith("GPT2"),
        bias="none",
    )
    inject_adapter_in_model(config, backbone)
    for name, parameter in backbone.named_parameters():
        adapter = "lora_" in name
        parameter.requires_grad_(adapter)
        if adapter:
            # A bfloat16 adapter would lose every update below a 256th of its weights.
            parameter.data = parameter.data.float()


def adapter_state(backbone: nn.Module) -> dict[str, Tensor]:
    """The adapter's matrices: "<layer>.lora_A" [r, in] and "<layer>.lora_B" [out, r]."""
    return {
        name.replace(".default.weight", ""): parameter.detach()
        for name, parameter in backbone.named_parameters()
        if "lora_" in name
    }


@torch.no_grad()
def merge_into(backbone: Any, state: Mapping[str, Tensor], options: LoraOptions) -> None:
    """Add ``alpha / r * B @ A`` to the plain layers of a backbone without adapters, in place.

    Raises:
        BundleError: the state names a layer that the backbone lacks, or shapes disagree.
    """
    modules = dict(backbone.named_modules())
    for name in sorted({key.rsplit(".", 1)[0] for key in state}):
        module = modules.get(name)
        if module is None or f"{name}.lora_A" not in state or f"{name}.lora_B" not in state:
            raise BundleError(f"adapter layer {name!r} does not fit the backbone")
        a, b = state[f"{name}.lora_A"].float(), state[f"{name}.lora_B"].float()
        update = options.alpha / options.r * (b @ a)
        # GPT-2 keeps its weights as [in, out] (Conv1D).
        if type(module).__name__ == "Conv1D":
            update = update.T
        if update.shape != module.weight.shape:
            raise BundleError(
                f"adapter layer {name!r} is {tuple(update.shape)}, "
                f"the backbone's is {tuple(module.weight.shape)}"
            )
        module.weight.copy_((module.weight.float() + update).to(module.weight.dtype))
