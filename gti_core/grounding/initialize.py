"""Starting values for the SID rows (paper, section on initialization).

Mean initialization is usual practice; it puts every new row on one point. Random
initialization keeps rows apart without relation to the pretrained space; text-mean initialization
starts each code at the words of its items.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def text_mean_rows(
    embedding: Tensor,
    item_token_ids: Sequence[Sequence[int]],
    item_rows: Sequence[Sequence[int]],
    rows: int,
) -> Tensor:
    """Each row is the mean of the text rows of the words of its items.

    An item counts once per row, whatever the length of its text. A row that no item uses, and an
    item without tokens, take the mean of all text rows.

    Args:
        embedding: shape [V, D].
        item_token_ids: per item, text tokens of its words.
        item_rows: per item, the rows of its SID's codes.
        rows: S.

    Returns:
        shape [S, D], float32.
    """
    weight = embedding.float()
    mean = weight.mean(dim=0)
    total = torch.zeros(rows, weight.shape[1], device=weight.device)
    count = torch.zeros(rows, 1, device=weight.device)
    for tokens, targets in zip(item_token_ids, item_rows, strict=True):
        words = weight[torch.tensor(tokens)].mean(dim=0) if tokens else mean
        index = torch.tensor(targets, device=weight.device)
        total[index] += words
        count[index] += 1
    return torch.where(count > 0, total / count.clamp_min(1), mean)
