"""Baselines a generative recommender has to beat: popularity and item-based neighbours.

Item neighbours: Sarwar et al., "Item-based collaborative filtering recommendation algorithms",
WWW 2001; the neighbour search is the ``implicit`` library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from implicit.nearest_neighbours import all_pairs_knn, bm25_weight, normalize, tfidf_weight
from scipy import sparse

from gti_core.errors import DataError
from gti_core.evaluation.metrics import NO_ITEM
from gti_core.types import LongArray

Weighting: TypeAlias = Literal["cosine", "tfidf", "bm25"]
"""How the user-item matrix is weighted before the dot products between its columns."""

_CASES_AT_A_TIME = 512


class Ranker(Protocol):
    """Anything that turns histories into ranked item rows."""

    def rank(
        self, histories: Sequence[Sequence[int]], k: int, exclude_seen: bool = True
    ) -> LongArray:
        """The k best item rows per history, best first.

        Args:
            histories: item rows, oldest first, one sequence per case; may be empty.
            k: places to fill.
            exclude_seen: leave out the items of the history.

        Returns:
            Shape [B, k], int64; `NO_ITEM` fills up a row once no item is left.
        """
        ...


class Popularity:
    """Ranks by the number of training interactions; equals keep row order.

    Args:
        train: training histories, item rows.
        items: N, number of items.
    """

    def __init__(self, train: Sequence[Sequence[int]], items: int) -> None:
        self.counts: LongArray = np.bincount(flat_rows(train, items), minlength=items)

    def rank(
        self, histories: Sequence[Sequence[int]], k: int, exclude_seen: bool = True
    ) -> LongArray:
        """See `Ranker.rank`."""
        return top_rows(self._scores, histories, k, exclude_seen, self.counts)

    def _scores(self, histories: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        return np.tile(self.counts.astype(np.float64), (len(histories), 1))


class ItemKnn:
    """Scores an item by its similarity to the items of the history; needs no known user.

    ``score(j) = sum over i in history of weight(i) * similarity(i, j)``, where the similarity is
    kept for the nearest neighbours j of i only, and never for j = i. An item that occurs more
    than once counts with the weight of its last occurrence. Items of equal score, above all those
    with none, are ordered by popularity, then row.

    Args:
        train: training histories, item rows; each makes one row of a binary user-item matrix.
        items: N, number of items.
        neighbours: nearest neighbours kept per item, at least 1.
        weighting: "cosine" of the plain columns, of "tfidf" weighted ones, or the dot product of
            "bm25" weighted ones.
        half_life: a history item's weight halves with every so many later items; None weighs
            all alike.

    Raises:
        DataError: a row outside 0..N-1, or a setting out of range.
    """

    def __init__(
        self,
        train: Sequence[Sequence[int]],
        items: int,
        *,
        neighbours: int = 100,
        weighting: Weighting = "cosine",
        half_life: float | None = None,
    ) -> None:
        if neighbours < 1:
            raise DataError(f"neighbours is {neighbours}; it must be at least 1")
        if half_life is not None and not half_life > 0:
            raise DataError(f"half_life is {half_life}; it must be above 0")
        if weighting not in get_args(Weighting):
            raise DataError(f"weighting is {weighting!r}, not one of {get_args(Weighting)}")
        self.half_life = half_life
        self.counts: LongArray = np.bincount(flat_rows(train, items), minlength=items)
        self._similarity = _neighbours(_matrix(train, items, None), neighbours, weighting)

    def rank(
        self, histories: Sequence[Sequence[int]], k: int, exclude_seen: bool = True
    ) -> LongArray:
        """See `Ranker.rank`."""
        return top_rows(self._scores, histories, k, exclude_seen, self.counts)

    def _scores(self, histories: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        weights = _matrix(histories, len(self.counts), self.half_life)
        scores: npt.NDArray[np.float64] = (weights @ self._similarity).toarray()
        return scores


def flat_rows(histories: Sequence[Sequence[int]], items: int) -> LongArray:
    """All rows of some histories, one after another, int64. DataError for a row outside 0..N-1."""
    flat = np.fromiter((row for history in histories for row in history), dtype=np.int64)
    if len(flat) and (flat.min() < 0 or flat.max() >= items):
        raise DataError(f"a history holds a row outside 0..{items - 1}")
    return flat


def _matrix(
    histories: Sequence[Sequence[int]], items: int, half_life: float | None
) -> sparse.csr_matrix:
    """Histories as rows over items, shape [B, N], float64; an item counts as last met."""
    indices: list[int] = []
    values: list[float] = []
    starts = [0]
    for history in histories:
        weights = {
            row: 1.0 if half_life is None else 0.5 ** ((len(history) - 1 - position) / half_life)
            for position, row in enumerate(history)
        }
        indices.extend(weights)
        values.extend(weights.values())
        starts.append(len(indices))
    flat_rows([indices], items)
    return sparse.csr_matrix(
        (np.array(values, dtype=np.float64), np.array(indices, dtype=np.int32), np.array(starts)),
        shape=(len(histories), items),
    )


def _neighbours(
    matrix: sparse.csr_matrix, neighbours: int, weighting: Weighting
) -> sparse.csr_matrix:
    """Similarity of each item to its nearest others, shape [N, N], at most K a row."""
    columns = matrix.T
    match weighting:
        case "cosine":
            weighted = normalize(columns)
        case "tfidf":
            weighted = normalize(tfidf_weight(columns))
        case _:
            weighted = bm25_weight(columns)
    # One more than asked, for the item itself, which the search takes for its own neighbour.
    similarity = all_pairs_knn(
        weighted.T.tocsr(), neighbours + 1, show_progress=False, num_threads=1
    ).tocoo()
    kept = (similarity.row != similarity.col) & (similarity.data > 0)
    rows, cols, data = similarity.row[kept], similarity.col[kept], similarity.data[kept]
    # By bm25 an item need not be its own nearest; then one neighbour too many came back.
    order = np.lexsort((cols, -data, rows))
    rows, cols, data = rows[order], cols[order], data[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = place < neighbours
    return sparse.csr_matrix((data[kept], (rows[kept], cols[kept])), shape=similarity.shape)


def top_rows(
    score: Callable[[Sequence[Sequence[int]]], npt.NDArray[np.float64]],
    histories: Sequence[Sequence[int]],
    k: int,
    exclude_seen: bool,
    counts: LongArray,
) -> LongArray:
    """Rows of the k best scores, shape [B, k]; equal scores by popularity, then row."""
    if k < 1:
        raise DataError(f"k is {k}; it must be at least 1")
    flat_rows(histories, len(counts))
    by_popularity = np.argsort(-counts, kind="stable")
    ranked = np.full((len(histories), k), NO_ITEM, dtype=np.int64)
    for start in range(0, len(histories), _CASES_AT_A_TIME):
        part = histories[start : start + _CASES_AT_A_TIME]
        scores = score(part)
        if exclude_seen:
            for case, history in enumerate(part):
                scores[case, list(history)] = -np.inf
        places = np.argsort(-scores[:, by_popularity], axis=1, kind="stable")[:, :k]
        rows = by_popularity[places]
        rows[np.isneginf(np.take_along_axis(scores, rows, axis=1))] = NO_ITEM
        ranked[start : start + len(part), : rows.shape[1]] = rows
    return ranked
