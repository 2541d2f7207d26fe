"""Mixed precision: float32 weights that are trained, bfloat16 products.

On CPUs with bfloat16 instructions this makes full fine-tuning faster by half, and saves LoRA the
casts of its inputs to float32 and back (`python -m bench.training`; docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def mixed(backbone: Any) -> Iterator[None]:
    """Autocast to bfloat16 on the backbone's device; adapters take inputs as they come.

    Args:
        backbone: a causal LM, with or without injected LoRA adapters.
    """
    from peft.helpers import disable_input_dtype_casting

    casting: AbstractContextManager[Any] = disable_input_dtype_casting(backbone)
    device = next(backbone.parameters()).device.type
    with ExitStack() as stack:
        stack.enter_context(casting)
        stack.enter_context(torch.autocast(device, dtype=torch.bfloat16))
        yield
