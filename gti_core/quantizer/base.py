"""Residual quantizers: from a text vector to a semantic ID.

With r_1 = z, a level takes c_l = argmin_k |r_l - q_k^(l)| and hands r_{l+1} = r_l - q_{c_l}^(l)
to the next one (the paper's section on item tokenization). Equal distances go to the lowest code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from gti_core.errors import DataError
from gti_core.types import FloatArray, IntArray, JsonDict

DoubleArray = NDArray[np.float64]


def as_vectors(vectors: NDArray[np.floating], width: int | None = None) -> FloatArray:
    """The vectors as float32 [N, E], checked.

    Raises:
        DataError: not two-dimensional, empty, not ``width`` wide, or not finite.
    """
    array = np.asarray(vectors, dtype=np.float32)
    if array.ndim != 2 or 0 in array.shape:
        raise DataError(f"vectors must have shape [N, E] with N, E > 0, got {array.shape}")
    if width is not None and array.shape[1] != width:
        raise DataError(f"vectors are {array.shape[1]} wide, the quantizer takes {width}")
    if not np.isfinite(array).all():
        raise DataError("vectors hold values that are not finite")
    return array


def squared_distances(rows: NDArray[np.floating], codebook: FloatArray) -> DoubleArray:
    """Squared Euclidean distances, shape [N, K], float64.

    Summed difference by difference, not by expanding the square: equal codewords get exactly
    equal distances, so that ties are decided by index and not by rounding.
    """
    distances: DoubleArray = cdist(
        rows.astype(np.float64), codebook.astype(np.float64), "sqeuclidean"
    )
    return distances


class Quantizer(ABC):
    """L codebooks over a d-wide space, and a map from E-wide text vectors into that space.

    Args:
        codebooks: one per level, shape [K_l, d], float32.

    Raises:
        DataError: no level, or codebooks of different width.
    """

    kind: ClassVar[str]
    """Name under which the quantizer is stored."""

    def __init__(self, codebooks: Sequence[FloatArray]) -> None:
        if not codebooks:
            raise DataError("a quantizer needs at least one level")
        width = np.asarray(codebooks[0]).shape[-1]
        self.codebooks: list[FloatArray] = [as_vectors(book, width) for book in codebooks]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes per level, length L."""
        return tuple(len(book) for book in self.codebooks)

    @property
    def levels(self) -> int:
        """L, the number of codebooks."""
        return len(self.codebooks)

    @property
    def width(self) -> int:
        """d, the width of a codeword."""
        return int(self.codebooks[0].shape[1])

    @abstractmethod
    def embed(self, vectors: FloatArray) -> FloatArray:
        """Text vectors [N, E] in codebook space, [N, d] float32."""

    @abstractmethod
    def decode(self, points: FloatArray) -> FloatArray:
        """Points of codebook space [N, d] back as text vectors, [N, E] float32."""

    @abstractmethod
    def to_tensors(self) -> dict[str, NDArray[np.float32]]:
        """Everything that `config` leaves out, as named float32 arrays for safetensors."""

    @abstractmethod
    def config(self) -> JsonDict:
        """The part that is JSON."""

    def quantize(self, vectors: FloatArray) -> IntArray:
        """Codes of the nearest path, shape [N, L], int32. Two rows may get the same codes."""
        residual = self.embed(vectors).astype(np.float64)
        codes = np.empty((len(residual), self.levels), dtype=np.int32)
        for level, book in enumerate(self.codebooks):
            codes[:, level] = squared_distances(residual, book).argmin(axis=1)
            residual -= book[codes[:, level]]
        return codes

    def sums(self, codes: IntArray) -> FloatArray:
        """Sum of the codewords of SIDs or of their prefixes: [N, l] to [N, d] float32."""
        total = np.zeros((len(codes), self.width), dtype=np.float64)
        for level in range(codes.shape[1]):
            total += self.codebooks[level][codes[:, level]]
        return total.astype(np.float32)

    def reconstruct(self, codes: IntArray) -> FloatArray:
        """Text vectors that SIDs stand for: [N, L] to [N, E] float32."""
        return self.decode(self.sums(codes))


def quantize_oracle(
    points: Sequence[Sequence[float]], codebooks: Sequence[Sequence[Sequence[float]]]
) -> list[list[int]]:
    """`Quantizer.quantize` on embedded points in plain Python, for tests. Lists of codes."""
    result = []
    for point in points:
        residual = [float(value) for value in point]
        codes = []
        for book in codebooks:
            best, best_distance = 0, float("inf")
            for code, word in enumerate(book):
                distance = sum((r - q) ** 2 for r, q in zip(residual, word, strict=True))
                if distance < best_distance:
                    best, best_distance = code, distance
            codes.append(best)
            residual = [r - q for r, q in zip(residual, book[best], strict=True)]
        result.append(codes)
    return result


def codebook_tensors(codebooks: Sequence[FloatArray]) -> dict[str, FloatArray]:
    """Codebooks under their stored names, ``codebook.0`` and so on."""
    return {f"codebook.{level}": book for level, book in enumerate(codebooks)}


def codebooks_from_tensors(tensors: dict[str, NDArray[np.float32]]) -> list[FloatArray]:
    """Inverse of `codebook_tensors`; other names are ignored. DataError when none is there."""
    books: list[FloatArray] = []
    while (name := f"codebook.{len(books)}") in tensors:
        books.append(np.asarray(tensors[name], dtype=np.float32))
    if not books:
        raise DataError("no tensor 'codebook.0' among the quantizer's tensors")
    return books


def from_tensors(kind: str, tensors: dict[str, NDArray[np.float32]], config: JsonDict) -> Quantizer:
    """A stored quantizer: inverse of its `kind`, `to_tensors` and `config`.

    Raises:
        DataError: an unknown kind, missing tensors, or shapes that contradict each other.
    """
    # Imported here: both modules build on this one.
    from gti_core.quantizer.kmeans import ResidualKMeans
    from gti_core.quantizer.rqvae import RqVae

    if kind == ResidualKMeans.kind:
        return ResidualKMeans.from_tensors(tensors, config)
    if kind == RqVae.kind:
        return RqVae.from_tensors(tensors, config)
    raise DataError(f"unknown quantizer kind {kind!r}")
