"""Figures about a block of rows: does it collapse?"""

from __future__ import annotations

import torch
from torch import Tensor


def effective_rank(rows: Tensor) -> float:
    """exp of the entropy of the normalized singular values (Roy and Vetterli, 2007).

    Args:
        rows: shape [S, D]; not centred, as in the paper's spectrum of E_SID.

    Returns:
        1 for rows on one line, min(S, D) for orthogonal rows of one length.
    """
    values = torch.linalg.svdvals(rows.double())
    share = values / values.sum().clamp_min(1e-30)
    share = share[share > 1e-12]
    return float(torch.exp(-(share * share.log()).sum()))


def mean_cosine(rows: Tensor) -> float:
    """Mean cosine similarity over distinct pairs of rows, shape [S, D]."""
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    count = unit.shape[0]
    if count < 2:
        return 1.0
    return float(((unit @ unit.T).sum() - count) / (count * (count - 1)))
