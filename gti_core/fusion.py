"""Faster forward and backward passes for long runs, without touching what is computed.

Two things cost most on a CPU besides the matrix products: the many small passes over memory of
norms and gates, which `torch.compile` fuses, and the backward pass of fused attention, which on
short bfloat16 sequences takes longer than all products together (`python -m bench.training`;
docs/performance.md). Only norms and MLPs are compiled: one layer's code serves all layers, so it is
ready in seconds, where a whole model takes minutes.
"""

from __future__ import annotations

import logging
import os
import shutil
from typing import Any

log = logging.getLogger(__name__)

SWITCH = "GTI_COMPILE"
"""Environment variable: 0 never compiles, 1 always does; otherwise large models on CPUs are."""
LEAST_PARAMETERS = 20_000_000
"""Smaller models are done before the compiler is."""
PARTS = ("RMSNorm", "MLP")
"""Endings of the class names of what is compiled. `torch.nn.LayerNorm` is one kernel already."""
_COMPILERS = ("g++", "clang++", "c++")


def prepare_training(backbone: Any) -> None:
    """Choose the attention with the fast backward pass, and fuse; after adapters are in.

    Args:
        backbone: a transformers causal LM that is going to be trained, in place.
    """
    if next(backbone.parameters()).device.type == "cpu":
        backbone.set_attn_implementation("eager")
    fuse(backbone)


def fuse(backbone: Any) -> int:
    """Compile norms and MLPs in place, where that pays and a compiler is there.

    Parameter names and results stay as they are, up to the rounding of the dtype.

    Args:
        backbone: a transformers causal LM.

    Returns:
        Modules that will be compiled when they first run.
    """
    if not _pays(backbone):
        return 0
    parts = [m for m in backbone.modules() if type(m).__name__.endswith(PARTS)]
    for part in parts:
        part.compile(dynamic=True)
    log.info("%d norms and MLPs will be compiled", len(parts))
    return len(parts)


def _pays(backbone: Any) -> bool:
    wish = os.environ.get(SWITCH, "")
    if wish == "0" or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False
    if next(backbone.parameters()).device.type != "cpu":
        return wish == "1"
    if not any(map(shutil.which, [os.environ["CXX"]] if "CXX" in os.environ else _COMPILERS)):
        return False
    return wish == "1" or sum(p.numel() for p in backbone.parameters()) >= LEAST_PARAMETERS
