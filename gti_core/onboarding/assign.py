"""A semantic ID for an item that arrives after training.

A SID of codes that all exist already would have to compete with what the model has memorized
about them, and is hardly ever recommended (docs/onboarding.md). So an item shares the first L - 1
codes of the known items that it resembles, and gets a reserved code of its own at the last level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gti_core.errors import GroundingError, ReserveExhaustedError
from gti_core.types import FloatArray, LongArray, Sid
from gti_core.vocabulary import SidVocabulary

_SHARPNESS = 10.0


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Known items that resemble new ones.

    Args:
        rows: catalogue rows, nearest first, shape [M, R], int64.
        similarity: cosine of the text vectors, [M, R], float32.
    """

    rows: LongArray
    similarity: FloatArray


def nearest_items(new: FloatArray, known: FloatArray, rows: LongArray, count: int) -> Neighbours:
    """The known items nearest to new ones.

    Args:
        new: text vectors of length 1, [M, E].
        known: text vectors of length 1 of the whole catalogue, [N, E].
        rows: catalogue rows that may be neighbours.
        count: neighbours wanted; fewer where there are fewer rows.

    Raises:
        GroundingError: there is no row.
    """
    if not len(rows):
        raise GroundingError("no item is in service that a new one could resemble")
    similarity = new @ known[rows].T
    count = min(count, len(rows))
    # Stable, so that equal texts give the same neighbours on every machine.
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    return Neighbours(rows[order], np.take_along_axis(similarity, order, axis=1))


def neighbour_weights(near: Neighbours, popularity: FloatArray) -> FloatArray:
    """What each neighbour tells of the users who may like a new item, [M, R], not normalized.

    A popular item tells more than an obscure one whose text happens to share its words.

    Args:
        near: neighbours.
        popularity: interactions by catalogue row, [N].
    """
    alike = np.exp(_SHARPNESS * (near.similarity - near.similarity[:, :1]))
    weights: FloatArray = alike * np.sqrt(1.0 + popularity[near.rows])
    return weights.astype(np.float32)


def assign_new(
    prefixes: Sequence[Sid], vocabulary: SidVocabulary, first_code: int
) -> tuple[list[Sid], SidVocabulary]:
    """SIDs with a new code of the last level each, and the vocabulary with these codes active.

    Args:
        prefixes: first L - 1 codes of each item.
        vocabulary: of the version that the items are added to.
        first_code: first code of the last level that no version has used.

    Raises:
        ReserveExhaustedError: the last level has too few reserved codes left.
    """
    last = vocabulary.levels - 1
    left = vocabulary.sizes[last] - max(first_code, vocabulary.active[last])
    if len(prefixes) > left:
        raise ReserveExhaustedError(max(0, left), len(prefixes))
    start = max(first_code, vocabulary.active[last])
    following = vocabulary.skip_to(last, start).activate(last, len(prefixes))
    return [(*prefix, start + number) for number, prefix in enumerate(prefixes)], following
