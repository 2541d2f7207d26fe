"""Which items a request may return, counted over ranges of the constraint index's order.

`Admissible` is one bit per item as a prefix sum: the items in service, or an attribute filter
that many requests share. `Filter` is one request's: a shared base less a short list of items
(those already seen), or the items of a list alone. Neither costs O(N) per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gti_core.errors import DecodingError
from gti_core.types import IntArray


@dataclass(frozen=True, eq=False)
class Admissible:
    """A set of items, as a prefix sum over the sorted order.

    Args:
        cumulative: shape [N + 1], int32, read-only; ``cumulative[hi] - cumulative[lo]`` admissible
            items lie in the range ``[lo, hi)`` of the index's order.
        snapshot: marks the snapshot whose order this is; positions mean nothing in another.
    """

    cumulative: IntArray
    snapshot: object = None

    @property
    def total(self) -> int:
        """Number of admissible items."""
        return int(self.cumulative[-1])

    def count(self, lo: int, hi: int) -> int:
        """Number of admissible items in ``[lo, hi)``."""
        return int(self.cumulative[hi] - self.cumulative[lo])

    def before(self, points: IntArray) -> IntArray:
        """Number of admissible items before each position, int32 of the shape of ``points``."""
        return self.cumulative[points]


@dataclass(frozen=True, eq=False)
class Filter:
    """The items one request may return; made by `ConstraintIndex.filter`.

    Args:
        base: items admissible before the list is looked at.
        listed: shape [E], int32, ascending positions of the sorted order, distinct, all in
            ``base``.
        include: True when the listed items alone may come back, False when they alone may not.
    """

    base: Admissible
    listed: IntArray
    include: bool

    @property
    def snapshot(self) -> object:
        """Marks the snapshot that the filter was made for."""
        return self.base.snapshot

    @property
    def total(self) -> int:
        """Number of admissible items."""
        return len(self.listed) if self.include else self.base.total - len(self.listed)

    def count(self, lo: int, hi: int) -> int:
        """Number of admissible items in ``[lo, hi)``; O(log E)."""
        before = self.before(np.array([lo, hi], dtype=np.int32))
        return int(before[1] - before[0])

    def before(self, points: IntArray) -> IntArray:
        """Number of admissible items before each position; O(log E) each."""
        listed = np.searchsorted(self.listed, points).astype(np.int32)
        return listed if self.include else self.base.cumulative[points] - listed


def checked_rows(rows: Iterable[int], count: int) -> IntArray:
    """Distinct catalogue rows, ascending, int32.

    Raises:
        DecodingError: a row that is negative or not below ``count``.
    """
    found = rows if isinstance(rows, np.ndarray) else np.fromiter(rows, dtype=np.int64)
    distinct = np.unique(found)
    if distinct.size and not (distinct[0] >= 0 and distinct[-1] < count):
        wrong = distinct[0] if distinct[0] < 0 else distinct[-1]
        raise DecodingError(f"there is no catalogue row {wrong} among {count}")
    return distinct.astype(np.int32)
