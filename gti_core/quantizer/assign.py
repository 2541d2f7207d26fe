"""Collisions: one distinct semantic ID per item, as near to its own codes as room allows."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from scipy.optimize import linear_sum_assignment

from gti_core.errors import CatalogError
from gti_core.quantizer.base import DoubleArray, Quantizer, squared_distances
from gti_core.types import FloatArray, IntArray, JsonDict, LongArray, Sid

_FIRST_WIDTH = 32


def assign_unique(quantizer: Quantizer, vectors: FloatArray) -> IntArray:
    """Distinct SIDs for all rows, shape [N, L], int32. Deterministic.

    Items with the same first L-1 codes share out the codes of the last level: as many as possible
    keep their nearest SID (so an item that collides with nobody keeps it), and among those
    solutions the sum of squared distances is smallest. A prefix with more items than the last
    level has codes first gives up its surplus: the items for which the nearest prefix with room
    is least worse than their own.

    Args:
        quantizer: its codebooks set the capacity, the product of its sizes.
        vectors: text vectors, [N, E]; equal rows are allowed.

    Raises:
        CatalogError: N is larger than the capacity.
        DataError: vectors that the quantizer can't take.
    """
    points = quantizer.embed(vectors)
    capacity = math.prod(quantizer.sizes)
    if len(points) > capacity:
        raise CatalogError(
            f"{len(points)} items do not fit into {capacity} semantic IDs of sizes "
            f"{list(quantizer.sizes)}; use more levels or larger codebooks"
        )
    nearest = quantizer.quantize(vectors)
    members: dict[Sid, list[int]] = defaultdict(list)
    for row, codes in enumerate(nearest[:, :-1].tolist()):
        members[tuple(codes)].append(row)
    moved = _relieve(quantizer, points, members)

    assigned = nearest.copy()
    last = quantizer.codebooks[-1]
    for prefix, rows in sorted(members.items()):
        rows.sort()
        kept = np.array([row not in moved for row in rows])
        if kept.all() and len(np.unique(nearest[rows, -1])) == len(rows):
            continue
        prefixes = np.tile(np.array(prefix, dtype=np.int32), (len(rows), 1))
        residuals = points[rows].astype(np.float64) - quantizer.sums(prefixes)
        cost = squared_distances(residuals, last)
        # Keeping one more nearest SID outweighs any gain in distance.
        penalty = len(rows) * (cost.max() - cost.min()) + 1.0
        bonus = np.zeros_like(cost)
        bonus[np.flatnonzero(kept), nearest[rows, -1][kept]] = penalty
        _, codes = linear_sum_assignment(cost - bonus)
        assigned[rows, :-1] = prefixes
        assigned[rows, -1] = codes
    return assigned


def _relieve(quantizer: Quantizer, points: FloatArray, members: dict[Sid, list[int]]) -> set[int]:
    """Moves the surplus of overfull prefixes, in place. Returns the rows that were moved."""
    room = quantizer.sizes[-1]
    surplus = {prefix: len(rows) - room for prefix, rows in members.items() if len(rows) > room}
    moved: set[int] = set()
    candidates: dict[int, Iterator[tuple[float, Sid]]] = {}
    heap: list[tuple[float, int, Sid, Sid]] = []

    def offer(row: int, home: Sid) -> None:
        # No prefix regains room, so each row walks its candidates once.
        distance, target = next(
            (distance, prefix)
            for distance, prefix in candidates[row]
            if len(members.get(prefix, ())) < room
        )
        heapq.heappush(heap, (distance - own[row], row, home, target))

    own: dict[int, float] = {}
    for home in sorted(surplus):
        base = quantizer.sums(np.array([home], dtype=np.int32))[0].astype(np.float64)
        for row in members[home]:
            own[row] = float(((points[row] - base) ** 2).sum())
            candidates[row] = _prefixes_by_distance(quantizer, points[row])
            offer(row, home)
    while heap:
        _, row, home, target = heapq.heappop(heap)
        if not surplus[home]:
            continue
        if len(members.get(target, ())) >= room:
            offer(row, home)
            continue
        members[home].remove(row)
        members[target].append(row)
        moved.add(row)
        surplus[home] -= 1
    return moved


def _prefixes_by_distance(quantizer: Quantizer, point: FloatArray) -> Iterator[tuple[float, Sid]]:
    """Prefixes of L-1 codes with their squared distance from a point, nearest first.

    Searches level by level with a beam that doubles when its prefixes are used up (those come
    again then); a beam as wide as the number of prefixes is exhaustive, so all come in the end.
    """
    width = _FIRST_WIDTH
    while True:
        distances, prefixes = _nearest_prefixes(quantizer, point, width)
        for distance, codes in zip(distances.tolist(), prefixes.tolist(), strict=True):
            yield distance, tuple(codes)
        if len(distances) < width:
            return
        width *= 2


def _nearest_prefixes(
    quantizer: Quantizer, point: FloatArray, width: int
) -> tuple[DoubleArray, IntArray]:
    """Up to ``width`` prefixes of L-1 codes near a point.

    Returns:
        Squared distances [W] float64, ascending, and codes [W, L-1] int32.
    """
    residuals = point.astype(np.float64)[None]
    codes = np.empty((1, 0), dtype=np.int32)
    distances = np.zeros(1)
    for book in quantizer.codebooks[:-1]:
        every = squared_distances(residuals, book)
        order = np.argsort(every, axis=None, kind="stable")[:width]
        parent, code = np.divmod(order, len(book))
        distances = every.ravel()[order]
        residuals = residuals[parent] - book[code]
        codes = np.concatenate([codes[parent], code[:, None].astype(np.int32)], axis=1)
    return distances, codes


def quantization_report(
    quantizer: Quantizer, vectors: FloatArray, assigned: IntArray | None = None
) -> JsonDict:
    """How well a quantizer fits a catalogue. JSON values only; shares lie between 0 and 1.

    - ``utilization``: share of each level's codes that some item's own (nearest) path uses.
    - ``entropy_bits``, ``perplexity``: of each level's code frequencies; perplexity is the number
      of equally frequent codes that would be as spread out.
    - ``collision_rate``: share of items whose nearest SID is also another item's.
    - ``moved_share``, ``moved_prefix_share``: share of items whose assigned SID, or its first
      L-1 codes, differ from the nearest.
    - ``reconstruction_error``, ``assigned_reconstruction_error``: squared error of the text
      vectors rebuilt from nearest and from assigned SIDs, as a share of the vectors' squared
      distance from their mean (0 is exact, 1 is no better than the mean). None if all vectors
      are equal.

    Args:
        quantizer: the quantizer.
        vectors: text vectors, [N, E].
        assigned: result of `assign_unique`, [N, L]; computed when left out.

    Raises:
        CatalogError: ``assigned`` is left out and the items don't fit.
    """
    nearest = quantizer.quantize(vectors)
    if assigned is None:
        assigned = assign_unique(quantizer, vectors)
    counts = [
        np.bincount(nearest[:, level], minlength=size) for level, size in enumerate(quantizer.sizes)
    ]
    entropies = [_entropy_bits(count) for count in counts]
    _, inverse, shared = np.unique(nearest, axis=0, return_inverse=True, return_counts=True)
    differs = assigned != nearest
    spread = float(((vectors - vectors.mean(axis=0, dtype=np.float64)) ** 2).sum())

    def error(codes: IntArray) -> float | None:
        if spread == 0.0:
            return None
        return float(((vectors - quantizer.reconstruct(codes)) ** 2.0).sum()) / spread

    return {
        "kind": quantizer.kind,
        "items": len(nearest),
        "sizes": list(quantizer.sizes),
        "utilization": [float((count > 0).mean()) for count in counts],
        "entropy_bits": entropies,
        "perplexity": [2.0**entropy for entropy in entropies],
        "collision_rate": float((shared[inverse.reshape(-1)] > 1).mean()),
        "moved_share": float(differs.any(axis=1).mean()),
        "moved_prefix_share": float(differs[:, :-1].any(axis=1).mean()),
        "reconstruction_error": error(nearest),
        "assigned_reconstruction_error": error(assigned),
    }


def _entropy_bits(counts: LongArray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return abs(float((shares * np.log2(shares)).sum()))
