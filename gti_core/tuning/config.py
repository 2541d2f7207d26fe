"""Settings of a training run. No torch here: commands read them before they need it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gti_core.errors import PipelineError


@dataclass(frozen=True)
class LoopConfig:
    """Settings of one training run.

    Args:
        epochs: passes over the examples.
        steps: so many steps instead of epochs; 0 goes by epochs.
        batch_size: examples per step.
        lr: peak learning rate of the backbone's or adapter's parameters.
        rows_lr: peak learning rate of the SID rows.
        warmup: steps of linear warm-up.
        decay: final share of the steps over which the rate falls linearly to zero; constant in
            between, so that a run can be continued with more epochs from any checkpoint.
        weight_decay: AdamW's, not applied to the SID rows.
        clip: largest gradient norm.
        seed: orders examples and seeds dropout.
        checkpoint_seconds: least time between two checkpoints.
    """

    epochs: float = 1.0
    batch_size: int = 16
    lr: float = 1e-4
    rows_lr: float = 1e-3
    warmup: int = 20
    decay: float = 0.3
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 120.0
    steps: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise PipelineError(f"batch size must be at least 1, got {self.batch_size}")
        for name in ("epochs", "lr", "rows_lr", "clip"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise PipelineError(f"{name} must be a positive number, got {value}")
        if self.steps < 0:
            raise PipelineError(f"steps must not be negative, got {self.steps}")
        if not 0 <= self.decay <= 1:
            raise PipelineError(f"decay must lie between 0 and 1, got {self.decay}")

    def steps_for(self, examples: int) -> int:
        """Total steps for a number of examples per epoch."""
        if self.steps:
            return self.steps
        return max(1, math.ceil(self.epochs * math.ceil(examples / self.batch_size)))

    def rate(self, step: int, steps: int) -> float:
        """Factor on the peak learning rates at a step: warm-up, plateau, linear decay."""
        decay_steps = max(1, round(self.decay * steps))
        return min(1.0, (step + 1) / max(1, self.warmup), (steps - step) / decay_steps)
