"""Grounding as a regression: rows fitted to item texts encoded by the frozen LM.

The second reading of GTI. Each item's text becomes one vector t_i, the mean of the frozen LM's
last hidden states; the rows of its codes c_1..c_L are fitted so that their deviations from the
mean row add up to t_i's deviation from the mean text:

    min over delta of  sum_i |sum_l delta[c_l(i)] - (t_i - mean t)|^2 + ridge * |delta|^2

which mirrors how a residual quantizer builds a vector from its codewords. The problem is linear,
so it is solved exactly and takes milliseconds; encoding the texts once is the whole cost.

Hidden states and embedding rows have different scales. A row starts at the mean text row, and each
level's deviations are scaled to the text rows' own root mean square deviation, so that grounded
rows are as far apart as words are.

A causal LM's hidden states lie mostly in a few directions (Ethayarajh, EMNLP 2019), and rows fitted
to them inherit that. Whitening them in part evens the spectrum out and keeps who is near whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gti_core.errors import DataError
from gti_core.types import IntArray
from gti_core.vocabulary import SidVocabulary

RIDGE = 1.0
"""Weight of |delta|^2: a code of one item keeps half of that item's deviation."""


@torch.no_grad()
def text_vectors(
    model: Any,
    token_ids: Sequence[Sequence[int]],
    *,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Mean of the last hidden states over each text's tokens, shape [N, D], float32.

    Args:
        model: a frozen causal LM.
        token_ids: N texts, none empty.
        batch_size: texts per forward pass.
        progress: called with (texts done, N).

    Raises:
        DataError: a text without tokens.
    """
    if any(len(ids) == 0 for ids in token_ids):
        raise DataError("a text has no tokens to encode")
    device = model.get_input_embeddings().weight.device
    width = int(model.get_input_embeddings().weight.shape[1])
    vectors = torch.empty(len(token_ids), width)
    order = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        longest = len(token_ids[part[-1]])
        ids = torch.zeros(len(part), longest, dtype=torch.int64, device=device)
        mask = torch.zeros(len(part), longest, device=device)
        for row, i in enumerate(part):
            ids[row, : len(token_ids[i])] = torch.tensor(list(token_ids[i]), device=device)
            mask[row, : len(token_ids[i])] = 1.0
        # Padding lies on the right, where a causal model can't see it.
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()
        pooled = (hidden * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        vectors[torch.tensor(part)] = pooled.cpu()
        if progress is not None:
            progress(start + len(part), len(order))
    return vectors


def regression_rows(
    vectors: Tensor,
    sids: IntArray,
    vocabulary: SidVocabulary,
    text_rows: Tensor,
    *,
    ridge: float = RIDGE,
    whitening: float = 0.0,
) -> Tensor:
    """Rows fitted to text vectors; see the module's text.

    Args:
        vectors: t_i, shape [N, D].
        sids: shape [N, L], one SID per vector.
        vocabulary: SID vocabulary.
        text_rows: the backbone's matrix whose scale the rows take, shape [V, D].
        ridge: weight of |delta|^2, above 0.
        whitening: p between 0 and 1; singular values s of the deviations of the rows in use become
            s ** (1 - p), all levels together, at the same root mean square.

    Returns:
        shape [S, D], float32. Rows of codes that no item uses, reserved ones among them, are the
        mean text row.
    """
    weight = text_rows.float().cpu()
    mean = weight.mean(dim=0)
    spread = (weight - mean).pow(2).mean().sqrt()
    offsets = torch.tensor(vocabulary.offsets)
    rows = torch.as_tensor(sids.astype("int64")) + offsets
    design = torch.zeros(len(rows), vocabulary.rows, dtype=torch.float64)
    design.scatter_(1, rows, 1.0)
    target = (vectors - vectors.mean(dim=0)).double()
    gram = design.T @ design + ridge * torch.eye(vocabulary.rows, dtype=torch.float64)
    delta = torch.linalg.solve(gram, design.T @ target).float()
    for level in range(vocabulary.levels):
        used = torch.unique(rows[:, level])
        size = delta[used].pow(2).mean().sqrt()
        if float(size) > 0.0:
            delta[used] *= spread / size
    if whitening > 0.0:
        used = torch.unique(rows)
        delta[used] = _whitened(delta[used], whitening)
    grounded: Tensor = mean + delta
    return grounded


def _whitened(delta: Tensor, power: float) -> Tensor:
    """Deviations [n, D] with their singular values raised to 1 - power, at the same scale."""
    left, values, right = torch.linalg.svd(delta.double(), full_matrices=False)
    # Directions that hold rounding only must stay empty.
    kept = values > values.max() * 1e-6
    spread = delta.double().pow(2).mean().sqrt()
    values = torch.where(kept, values.clamp_min(1e-300) ** (1.0 - power), torch.zeros_like(values))
    flat: Tensor = (left * values) @ right
    flat *= spread / flat.pow(2).mean().sqrt().clamp_min(1e-300)
    return flat.float()
