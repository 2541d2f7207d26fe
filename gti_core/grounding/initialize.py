"""Starting values for the SID rows (paper, section on initialization).

Mean initialization is usual practice; it puts every new row on one point. Random
initialization keeps rows apart without relation to the pretrained space.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_rows(embedding: Tensor, rows: int) -> Tensor:
    """Mean of the text rows, repeated.

    Args:
        embedding: shape [V, D].
        rows: S.

    Returns:
        shape [S, D], float32.
    """
    return embedding.float().mean(dim=0, keepdim=True).repeat(rows, 1)


def random_rows(embedding: Tensor, rows: int, *, seed: int) -> Tensor:
    """Independent normal draws with the text rows' mean and per-dimension deviation.

    Args:
        embedding: shape [V, D].
        rows: S.
        seed: seed of the draw.

    Returns:
        shape [S, D], float32.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = embedding.float()
    noise = torch.randn(rows, weight.shape[1], generator=generator)
    return weight.mean(dim=0) + noise.to(weight.device) * weight.std(dim=0)
