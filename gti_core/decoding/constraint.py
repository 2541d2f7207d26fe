"""The constraint index: which codes may follow a prefix, under a filter.

Items are sorted by semantic ID, so every prefix is a half-open range ``[lo, hi)`` of that
order and its children are found inside the range. A filter is one bit per item; the prefix sum
of the bits tells in O(1) whether a range still holds an admissible item, so the beam never
walks into a dead end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gti_core.errors import CatalogError
from gti_core.types import IntArray, LongArray, Sid


@dataclass(frozen=True)
class Admissible:
    """Which items a request may return.

    Args:
        cumulative: shape [N + 1], int64; ``cumulative[hi] - cumulative[lo]`` admissible items lie
            in the range ``[lo, hi)`` of the index's order.
    """

    cumulative: LongArray

    @property
    def total(self) -> int:
        """Number of admissible items."""
        return int(self.cumulative[-1])

    def count(self, lo: int, hi: int) -> int:
        """Number of admissible items in ``[lo, hi)``."""
        return int(self.cumulative[hi] - self.cumulative[lo])


@dataclass(frozen=True)
class Children:
    """The admissible children of one prefix.

    Args:
        codes: shape [C], int32, ascending codes at the prefix's next level.
        lo: shape [C], int64, start of each child's range.
        hi: shape [C], int64, end of each child's range.
    """

    codes: IntArray
    lo: LongArray
    hi: LongArray


class ConstraintIndex:
    """Immutable index over the SIDs of a catalogue.

    Args:
        sids: shape [N, L], int32, one row per catalogue row; distinct.

    Raises:
        CatalogError: not two-dimensional, empty, negative codes or a repeated SID.
    """

    def __init__(self, sids: IntArray) -> None:
        if sids.ndim != 2 or sids.shape[0] == 0 or sids.shape[1] == 0:
            raise CatalogError(f"SIDs must have shape [N, L], got {sids.shape}")
        if int(sids.min()) < 0:
            raise CatalogError("codes must not be negative")
        order = np.lexsort(sids.T[::-1])
        self.sids: IntArray = np.ascontiguousarray(sids[order], dtype=np.int32)
        if len(order) > 1 and bool((self.sids[1:] == self.sids[:-1]).all(axis=1).any()):
            raise CatalogError("two items share a SID")
        self.rows: LongArray = order.astype(np.int64)
        """Catalogue row of each position of the sorted order, shape [N]."""
        self.positions: LongArray = np.empty_like(self.rows)
        """Sorted position of each catalogue row, shape [N]."""
        self.positions[self.rows] = np.arange(len(order))
        for array in (self.sids, self.rows, self.positions):
            array.flags.writeable = False

    def __len__(self) -> int:
        return int(self.sids.shape[0])

    @property
    def levels(self) -> int:
        """L, codes per SID."""
        return int(self.sids.shape[1])

    def admissible(self, excluded_rows: Iterable[int] = ()) -> Admissible:
        """Every item but the given catalogue rows (duplicates allowed)."""
        bits = np.ones(len(self), dtype=np.int64)
        excluded = np.fromiter(excluded_rows, dtype=np.int64)
        if excluded.size:
            bits[self.positions[excluded]] = 0
        return Admissible(np.concatenate([[0], np.cumsum(bits)]))

    def children(self, lo: int, hi: int, level: int, admissible: Admissible) -> Children:
        """Admissible children of the prefix with range ``[lo, hi)``, at ``level``.

        A child is admissible when at least one admissible item lies below it.
        """
        column = self.sids[lo:hi, level]
        starts = np.concatenate([[0], np.flatnonzero(column[1:] != column[:-1]) + 1]) + lo
        ends = np.concatenate([starts[1:], [hi]])
        alive = admissible.cumulative[ends] > admissible.cumulative[starts]
        return Children(self.sids[starts[alive], level], starts[alive], ends[alive])


def admissible_children_oracle(
    sids: Iterable[Sid], prefix: Sid, excluded: frozenset[Sid] = frozenset()
) -> list[int]:
    """Plain-Python oracle: codes that lead from ``prefix`` to an item outside ``excluded``."""
    depth = len(prefix)
    return sorted({sid[depth] for sid in sids if sid[:depth] == prefix and sid not in excluded})
