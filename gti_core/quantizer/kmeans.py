"""Residual k-means: one k-means per level, each on what the levels before left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gti_core.errors import DataError
from gti_core.quantizer.base import (
    Quantizer,
    as_vectors,
    codebook_tensors,
    codebooks_from_tensors,
    squared_distances,
)
from gti_core.types import FloatArray, JsonDict


class ResidualKMeans(Quantizer):
    """Codebooks in the text encoder's own space; `embed` and `decode` are the identity."""

    kind = "residual-kmeans"

    def embed(self, vectors: FloatArray) -> FloatArray:
        """The vectors themselves, checked, [N, E] float32."""
        return as_vectors(vectors, self.width)

    def decode(self, points: FloatArray) -> FloatArray:
        """The points themselves, [N, E] float32."""
        return points

    def to_tensors(self) -> dict[str, NDArray[np.float32]]:
        """The codebooks."""
        return codebook_tensors(self.codebooks)

    def config(self) -> JsonDict:
        """Sizes, for people who read the file; the tensors say the same."""
        return {"sizes": list(self.sizes)}

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, NDArray[np.float32]], config: JsonDict
    ) -> ResidualKMeans:
        """Inverse of `to_tensors` and `config`. Raises DataError where they disagree."""
        quantizer = cls(codebooks_from_tensors(tensors))
        if tuple(config.get("sizes", quantizer.sizes)) != quantizer.sizes:
            raise DataError(
                f"quantizer config says sizes {config['sizes']}, its tensors {quantizer.sizes}"
            )
        return quantizer


def check_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes as a tuple. Raises DataError when there is none or one is below 1."""
    checked = tuple(int(size) for size in sizes)
    if not checked or min(checked) < 1:
        raise DataError(f"sizes must be one positive number per level, got {list(sizes)}")
    return checked


def fit_residual_kmeans(
    vectors: FloatArray,
    sizes: Sequence[int],
    *,
    seed: int,
    restarts: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> ResidualKMeans:
    """Fits one k-means per level. The same vectors, sizes and seed give the same codebooks.

    A level with no more distinct residuals than codes takes those residuals as they are and
    repeats them to fill the level; the repeats are never nearest, but serve as spare codes for
    items that collide.

    Args:
        vectors: text vectors, [N, E].
        sizes: codes per level, length L.
        seed: of the k-means starts.
        restarts: k-means runs per level, of which the best is kept.
        progress: called with (levels done, L) after each level.

    Raises:
        DataError: vectors or sizes that can't be used.
    """
    checked = check_sizes(sizes)
    points = as_vectors(vectors)
    residual = points.astype(np.float64)
    books: list[FloatArray] = []
    for level, size in enumerate(checked):
        book = _fit_level(residual.astype(np.float32), size, seed + level, restarts)
        residual -= book[squared_distances(residual, book).argmin(axis=1)]
        books.append(book)
        if progress is not None:
            progress(level + 1, len(checked))
    return ResidualKMeans(books)


def _fit_level(points: FloatArray, size: int, seed: int, restarts: int) -> FloatArray:
    """Codebook [size, d] of one level."""
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    distinct = np.unique(points, axis=0)
    if len(distinct) <= size:
        filled: FloatArray = distinct[np.arange(size) % len(distinct)]
        return filled
    # One thread: the order of a parallel sum depends on the machine, and so would the codebooks.
    with threadpool_limits(limits=1):
        model = KMeans(size, n_init=restarts, random_state=seed).fit(points)
    # Means again in float64, so that an item alone in its cluster leaves a residual of zero.
    book = np.asarray(model.cluster_centers_, dtype=np.float32).copy()
    for code in range(size):
        members = points[model.labels_ == code]
        if len(members):
            book[code] = members.mean(axis=0, dtype=np.float64)
    return book
