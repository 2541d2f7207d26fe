"""Figures about a block of rows: does it collapse, and does it keep the codebooks' geometry?

The paper's diagnostics: cosine matrix, singular values with their effective rank, and
representational similarity analysis (RSA) against the codebooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gti_core.errors import DataError

Rows: TypeAlias = "Tensor | NDArray[Any]"
"""A block of rows [S, D], from torch or NumPy."""

_DECIMALS = 6
"""Cosines of float32 rows are not known better; what differs by less counts as equal."""


@dataclass(frozen=True)
class Rsa:
    """Correlation of two geometries, each between -1 and 1; None where it is undefined.

    Args:
        pearson: linear correlation of the cosines.
        spearman: correlation of their ranks.
    """

    pearson: float | None
    spearman: float | None


def _double(rows: Rows) -> Tensor:
    block = torch.as_tensor(rows).detach().double()
    if block.ndim != 2:
        raise DataError(f"rows must have shape [S, D], got {tuple(block.shape)}")
    if not bool(torch.isfinite(block).all()):
        raise DataError("rows hold values that are not finite")
    return block


def effective_rank(rows: Rows) -> float:
    """exp of the entropy of the normalized singular values (Roy and Vetterli, 2007).

    Args:
        rows: shape [S, D]; not centred, as in the paper's spectrum of E_SID.

    Returns:
        1 for rows on one line, min(S, D) for orthogonal rows of one length.
    """
    values = torch.linalg.svdvals(_double(rows))
    share = values / values.sum().clamp_min(1e-30)
    share = share[share > 1e-12]
    return float(torch.exp(-(share * share.log()).sum()))


def spectrum(rows: Rows) -> Tensor:
    """Singular values as shares of the largest, in falling order.

    Args:
        rows: shape [S, D]; not centred.

    Returns:
        shape [min(S, D)], float64; the first is 1. Zeros for a block of zeros.
    """
    values: Tensor = torch.linalg.svdvals(_double(rows))
    return values / values.max().clamp_min(1e-30)


def cosine_matrix(rows: Rows) -> Tensor:
    """Cosine similarity of every pair of rows.

    Args:
        rows: shape [S, D].

    Returns:
        shape [S, S], float64, symmetric, within [-1, 1], ones on the diagonal. A row of zeros
        has no direction: its cosine with every other row is 0.
    """
    unit = torch.nn.functional.normalize(_double(rows), dim=1)
    cosines = (unit @ unit.T).clamp(-1.0, 1.0)
    return cosines.fill_diagonal_(1.0)


def mean_cosine(rows: Rows) -> float:
    """Mean cosine similarity over distinct pairs of rows, shape [S, D]."""
    count = len(rows)
    if count < 2:
        return 1.0
    return float((cosine_matrix(rows).sum() - count) / (count * (count - 1)))


def rsa(rows: Rows, codebook_vectors: Rows) -> Rsa:
    """Does the geometry of the rows follow that of the codebook vectors they stand for?

    Correlates the upper triangles of both cosine matrices (paper, RSA). Neither a rotation of one
    side nor the length of any row changes the result. Cosines are compared to six decimals, so
    that rounding in the rows does not order pairs of equal angle.

    Args:
        rows: shape [S, D].
        codebook_vectors: shape [S, d]; vector i is the codeword of row i's code.

    Returns:
        Both correlations; None, never NaN, where all pairs of one side have the same cosine
        (collapsed rows, such as mean initialization) or where there are fewer than three rows.

    Raises:
        DataError: different numbers of rows, or values that are not finite.
    """
    # scipy.stats takes half a second to import, and grounding needs only the figures above.
    from scipy.stats import pearsonr, spearmanr

    if len(rows) != len(codebook_vectors):
        raise DataError(f"{len(rows)} rows, but {len(codebook_vectors)} codebook vectors")
    if len(rows) < 3:
        return Rsa(None, None)
    upper = np.triu_indices(len(rows), k=1)
    learned, given = (
        cosine_matrix(block).numpy()[upper].round(_DECIMALS) for block in (rows, codebook_vectors)
    )
    # Equal cosines may still round to two neighbouring values.
    if min(np.ptp(learned), np.ptp(given)) < 1.5 * 10**-_DECIMALS:
        return Rsa(None, None)
    return Rsa(
        float(pearsonr(learned, given).statistic), float(spearmanr(learned, given).statistic)
    )
