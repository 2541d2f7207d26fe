"""Where a new row of the last level starts, before or instead of grounding."""

from __future__ import annotations

import numpy as np

from gti_core.quantizer.base import Quantizer
from gti_core.types import FloatArray, IntArray


def mapped_rows(
    quantizer: Quantizer,
    known_rows: FloatArray,
    vectors: FloatArray,
    prefixes: IntArray,
    *,
    ridge: float = 1.0,
) -> FloatArray:
    """Rows from a linear map of codebook space, learned on the codes that the model knows.

    The last level's codeword of each code is what is left of its items' vectors after their
    prefix; a new item has such a remainder too. Ridge regression from codewords to rows, both
    centred, then says which row belongs to it.

    Args:
        quantizer: fitted codebooks, K codes at the last level.
        known_rows: rows of these codes, [K, D], float32.
        vectors: text vectors of new items, [M, E].
        prefixes: their first L - 1 codes, [M, L - 1].
        ridge: weight of the map's squared size, times the mean squared norm of a codeword.

    Returns:
        Shape [M, D], float32.
    """
    words = quantizer.codebooks[-1].astype(np.float64)
    rows = known_rows.astype(np.float64)
    centre, mean = words.mean(axis=0), rows.mean(axis=0)
    centred = words - centre
    weight = ridge * float((centred**2).sum(axis=1).mean())
    gram = centred.T @ centred + weight * np.eye(words.shape[1])
    map_ = np.linalg.solve(gram, centred.T @ (rows - mean))
    rest = quantizer.embed(vectors).astype(np.float64) - quantizer.sums(prefixes)
    mapped: FloatArray = (mean + (rest - centre) @ map_).astype(np.float32)
    return mapped
