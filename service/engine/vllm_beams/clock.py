"""How long the worker spends where, as the host sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from service.engine.vllm_beams.wire import TIMES


class Stretch:
    """Seconds spent inside a ``with`` block, over all its uses.

    On a GPU a forward pass only starts kernels, so the figure is the host's share there.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Clock:
    """The worker's stretches: the model on prompts, the model on beams, choosing the survivors."""

    def __init__(self) -> None:
        self.prompts = Stretch()
        self.beams = Stretch()
        self.constraint = Stretch()

    def seconds(self) -> dict[str, float]:
        """Name -> seconds so far."""
        return {name: stretch.seconds for name, stretch in vars(self).items()}


def stamped(answer: Tensor, first: int, seconds: Sequence[float]) -> Tensor:
    """An answer with times behind its items (`service.engine.vllm_beams.wire.TIMES`).

    The host does not wait for the device: a copy this small is taken over at once.

    Args:
        answer: [k, 2] float64.
        first: place of the first time.
        seconds: times, M of them.

    Returns:
        [k + M, 2].
    """
    times = [[TIMES - first - number, value] for number, value in enumerate(seconds)]
    rows = torch.tensor(times, dtype=answer.dtype).view(-1, 2)
    return torch.cat([answer, rows.to(answer.device, non_blocking=True)])
