"""Grounding of output rows on cached states: a convex problem, solved in milliseconds.

With everything else frozen, the probability of a new code in a state h is a softmax over h . w of
the new rows and one number for all old rows, log Z(h). Its cross-entropy is convex in the rows w
(DESIGN: compare IncDSI, arXiv 2307.10323). Old items enter as states in which the new codes are
not wanted, so that a row can't be fitted by shouting everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gti_core.errors import PipelineError
from gti_core.types import FloatArray


@dataclass(frozen=True, eq=False)
class Evidence:
    """States and what is wanted in them.

    Args:
        hidden: shape [n, D], float32.
        log_norm: log of the sum of exp(logit) over the rows that are kept, [n], float32.
        wanted: probability of each new code, [n, M], float32, rows summing to at most 1; the rest
            belongs to the rows that are kept.
        weights: weight of each state, [n], float32, not negative.
    """

    hidden: FloatArray
    log_norm: FloatArray
    wanted: FloatArray
    weights: FloatArray

    def __post_init__(self) -> None:
        n = len(self.hidden)
        if self.log_norm.shape != (n,) or self.weights.shape != (n,) or len(self.wanted) != n:
            raise PipelineError("evidence of different lengths")
        if n and not (self.wanted.min() >= 0 and self.wanted.sum(axis=1).max() <= 1 + 1e-5):
            raise PipelineError("wanted probabilities must lie between 0 and 1")


def fit_rows(
    start: FloatArray, evidence: Evidence, *, ridge: float = 1.0, steps: int = 100
) -> FloatArray:
    """Rows that minimize the weighted cross-entropy and their distance from a start.

    Args:
        start: rows to start from and to be drawn to, shape [M, D], float32.
        evidence: on the same M codes.
        ridge: weight of half the squared distance from ``start``, times the mean squared norm of
            the states, so that it does not depend on their scale.
        steps: most iterations of L-BFGS.

    Returns:
        Shape [M, D], float32.
    """
    hidden = torch.from_numpy(evidence.hidden)
    log_norm = torch.from_numpy(evidence.log_norm)
    wanted = torch.from_numpy(evidence.wanted)
    weights = torch.from_numpy(evidence.weights)
    if not len(hidden):
        return start.copy()
    scale = float(hidden.square().sum(dim=1).mean())
    origin = torch.from_numpy(start)
    # Of the size of a logit, whatever the scale of the states: L-BFGS starts with a unit step.
    moved = torch.zeros_like(origin, requires_grad=True)
    root = scale**0.5

    def loss() -> Tensor:
        logits = hidden @ (origin + moved / root).T
        total = torch.logsumexp(torch.cat([log_norm[:, None], logits], dim=1), dim=1)
        kept = (1 - wanted.sum(dim=1)) * log_norm
        entropy = total - kept - (wanted * logits).sum(dim=1)
        value: Tensor = (weights * entropy).sum() + 0.5 * ridge * moved.square().sum()
        return value

    optimizer = torch.optim.LBFGS(
        [moved], max_iter=steps, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    rows: FloatArray = (origin + moved.detach() / root).numpy().astype(np.float32)
    if not np.isfinite(rows).all():
        raise PipelineError("grounding did not converge")
    return rows
