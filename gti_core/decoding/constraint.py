"""The constraint index: which codes may follow a prefix, under a filter.

Items are sorted by semantic ID, so every prefix is a half-open range ``[lo, hi)`` of that
order. Per level the index stores where each prefix starts and its last code; the children of a
range are a slice of that list, found by binary search. The prefix sums of a filter tell in
O(1) whether a range still holds an admissible item, so the beam never walks into a dead end.

A snapshot is immutable. An insertion or a retirement makes the next one: it copies the arrays that
change, shares the others and sorts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from gti_core.decoding.filters import Admissible, Filter, checked_rows
from gti_core.decoding.splice import frozen, spliced
from gti_core.errors import CatalogError, DecodingError
from gti_core.types import BoolArray, IntArray, LongArray, Sid

__all__ = ["Admissible", "Children", "ConstraintIndex", "Filter", "admissible_children_oracle"]


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
    """Immutable index over the SIDs of a catalogue; item n of the catalogue is its row n.

    Memory per item is 16 bytes and 8 more per level whose prefixes are nearly all distinct.

    Args:
        sids: shape [N, L], int32, one row per catalogue row; distinct.
        available: shape [N], bool, by catalogue row; items that may come back. Default: all.

    Raises:
        CatalogError: not two-dimensional, empty, codes outside 0 .. 2^31 - 1, a repeated SID, or
            ``available`` of another length.
    """

    rows: IntArray
    """Catalogue row of each position of the sorted order, shape [N], int32."""
    positions: IntArray
    """Sorted position of each catalogue row, shape [N], int32."""
    starts: tuple[IntArray, ...]
    """Per level l < L - 1, where each prefix of l + 1 codes starts in the sorted order, ascending,
    then N; int32. At the last level every position starts a prefix, so nothing is stored."""
    codes: tuple[IntArray, ...]
    """Per level l, the last code of each prefix of l + 1 codes, in order, then a 0 so that the
    lengths are those of ``starts``; int32."""
    max_children: tuple[int, ...]
    """Per level, at least the most children any prefix of l codes has. Exact after a build; a
    retired item still counts."""
    code_bounds: tuple[int, ...]
    """Per level, one more than the highest code."""
    base: Admissible
    """The items in service."""

    def __init__(self, sids: IntArray, available: BoolArray | None = None) -> None:
        if sids.ndim != 2 or sids.shape[0] == 0 or sids.shape[1] == 0:
            raise CatalogError(f"SIDs must have shape [N, L], got {sids.shape}")
        _check_codes(sids)
        count, levels = sids.shape
        if available is not None and available.shape != (count,):
            raise CatalogError(f"{available.shape} availability bits for {count} items")
        columns = [np.ascontiguousarray(sids[:, level], dtype=np.int32) for level in range(levels)]
        order = np.lexsort(columns[::-1]).astype(np.int32)
        positions = np.empty_like(order)
        positions[order] = np.arange(count, dtype=np.int32)
        starts, codes, max_children = [], [], []
        new = np.zeros(count, dtype=np.bool_)
        new[0] = True
        parents = np.array([0, count], dtype=np.int32)
        for column in columns:
            ordered = column[order]
            new[1:] |= ordered[1:] != ordered[:-1]
            begins = np.append(np.flatnonzero(new), count).astype(np.int32)
            max_children.append(int(np.diff(np.searchsorted(begins, parents)).max()))
            codes.append(np.append(ordered[begins[:-1]], np.int32(0)))
            starts.append(begins)
            parents = begins
        if len(starts[-1]) != count + 1:
            raise CatalogError("two items share a SID")
        bits = np.ones(count, dtype=np.bool_) if available is None else available[order]
        self._fill(
            order,
            positions,
            starts[:-1],
            codes,
            tuple(max_children),
            tuple(int(column.max()) + 1 for column in columns),
            _prefix_sum(bits),
        )

    def _fill(
        self,
        rows: IntArray,
        positions: IntArray,
        starts: Sequence[IntArray],
        codes: Sequence[IntArray],
        max_children: tuple[int, ...],
        code_bounds: tuple[int, ...],
        cumulative: IntArray,
    ) -> Self:
        self.rows, self.positions = frozen(rows), frozen(positions)
        self.starts = tuple(frozen(array) for array in starts)
        self.codes = tuple(frozen(array) for array in codes)
        self.max_children, self.code_bounds = max_children, code_bounds
        self.base = Admissible(frozen(cumulative), object())
        return self

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def levels(self) -> int:
        """L, codes per SID."""
        return len(self.codes)

    @property
    def snapshot(self) -> object:
        """Marks this snapshot; the filters made for it carry the same object."""
        return self.base.snapshot

    @property
    def sids(self) -> IntArray:
        """The SIDs in sorted order, shape [N, L], int32, read-only. Made on every call, O(N L)."""
        table = np.empty((self.levels, len(self)), dtype=np.int32)
        for level, starts in enumerate(self.starts):
            table[level] = np.repeat(self.codes[level][:-1], np.diff(starts))
        table[-1] = self.codes[-1][:-1]
        return frozen(table.T)

    @property
    def available(self) -> BoolArray:
        """Whether each catalogue row is in service, shape [N], bool. Made on every call, O(N)."""
        bits: BoolArray = np.diff(self.base.cumulative).astype(np.bool_)
        return bits[self.positions]

    def in_service(self, row: int) -> bool:
        """Whether a catalogue row is in service. O(1)."""
        position = int(self.positions[row])
        return self.base.count(position, position + 1) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, shared ones included."""
        arrays = (self.rows, self.positions, self.base.cumulative, *self.starts, *self.codes)
        return sum(array.nbytes for array in arrays)

    # Filters

    def admissible(self, excluded_rows: Iterable[int] = ()) -> Admissible:
        """Every item in service but the given catalogue rows (duplicates allowed).

        O(N) as soon as a row is excluded; `filter` is for requests.

        Raises:
            DecodingError: a row outside the catalogue.
        """
        excluded = checked_rows(excluded_rows, len(self))
        if not excluded.size:
            return self.base
        bits = np.diff(self.base.cumulative).astype(np.bool_)
        bits[self.positions[excluded]] = False
        return Admissible(frozen(_prefix_sum(bits)), self.snapshot)

    def selection(self, mask: BoolArray) -> Admissible:
        """The items in service for which ``mask`` holds: an attribute filter, to keep and share.

        It belongs to this snapshot; the next one needs its own. O(N).

        Args:
            mask: shape [N], bool, by catalogue row.

        Raises:
            DecodingError: another length.
        """
        if mask.shape != (len(self),):
            raise DecodingError(f"a mask of shape {mask.shape} for {len(self)} items")
        bits = np.diff(self.base.cumulative).astype(np.bool_)
        bits &= mask.astype(np.bool_)[self.rows]
        return Admissible(frozen(_prefix_sum(bits)), self.snapshot)

    def filter(
        self,
        excluded_rows: Iterable[int] = (),
        included_rows: Iterable[int] | None = None,
        base: Admissible | None = None,
    ) -> Filter:
        """One request's filter: in ``base``, in ``included_rows`` if given, not excluded.

        The cost depends on the lengths of the lists alone; a list of more than some thousand rows
        is better made a `selection`.

        Args:
            excluded_rows: catalogue rows that must not come back, duplicates allowed.
            included_rows: the only catalogue rows that may come back, duplicates allowed.
            base: a `selection` of this snapshot. Default: the items in service.

        Raises:
            DecodingError: a row outside the catalogue, or a base of another snapshot.
        """
        base = self.base if base is None else base
        if base.snapshot is not self.snapshot:
            raise DecodingError("the filter's base was made for another snapshot")
        rows = checked_rows(excluded_rows, len(self))
        if included_rows is not None:
            rows = np.setdiff1d(checked_rows(included_rows, len(self)), rows, assume_unique=True)
        listed = self.positions[rows]
        listed = listed[base.cumulative[listed + 1] > base.cumulative[listed]]
        listed.sort()
        return Filter(base, frozen(listed), included_rows is not None)

    def children(self, lo: int, hi: int, level: int, admissible: Admissible | Filter) -> Children:
        """Admissible children of the prefix with range ``[lo, hi)``, at ``level``.

        A child is admissible when at least one admissible item lies below it.
        """
        if level < self.levels - 1:
            starts = self.starts[level]
            # Of the array's own type: any other would make searchsorted convert the whole array.
            first, last = np.searchsorted(starts, np.array([lo, hi], dtype=np.int32))
            edges = starts[first : last + 1]
        else:
            first, last = lo, hi
            edges = np.arange(lo, hi + 1, dtype=np.int32)
        before = admissible.before(edges)
        alive = before[1:] > before[:-1]
        return Children(
            self.codes[level][first:last][alive],
            edges[:-1][alive].astype(np.int64),
            edges[1:][alive].astype(np.int64),
        )

    # The next snapshot

    def retired(self, row: int) -> ConstraintIndex:
        """The next snapshot, with a catalogue row out of service. Its SID stays taken."""
        return self.with_availability([row], False)

    def restored(self, row: int) -> ConstraintIndex:
        """The next snapshot, with a catalogue row in service again."""
        return self.with_availability([row], True)

    def with_availability(self, rows: Iterable[int], available: bool) -> ConstraintIndex:
        """The next snapshot, with catalogue rows in or out of service; O(N), mostly one copy.

        Returns this snapshot when nothing changes.

        Raises:
            DecodingError: a row outside the catalogue.
        """
        changed = self.positions[checked_rows(rows, len(self))]
        cumulative = self.base.cumulative
        changed = changed[(cumulative[changed + 1] > cumulative[changed]) != available]
        at = np.sort(changed).astype(np.int64)
        if not at.size:
            return self
        added = np.full(len(at), 1 if available else -1)
        following = ConstraintIndex.__new__(ConstraintIndex)
        following.__dict__.update(self.__dict__)
        following.base = Admissible(frozen(spliced(cumulative, at + 1, added)), object())
        return following

    def inserted(self, sid: Sid, available: bool = True) -> ConstraintIndex:
        """The next snapshot, with one more item; its catalogue row is N. See `inserted_many`."""
        return self.inserted_many(np.array([sid]), np.array([available]))

    def inserted_many(self, sids: IntArray, available: BoolArray | None = None) -> ConstraintIndex:
        """The next snapshot, with M more items at the catalogue rows N .. N + M - 1.

        O(N + M log M): one copy of each array that changes.

        Args:
            sids: shape [M, L], distinct and new.
            available: shape [M], bool. Default: all in service.

        Raises:
            CatalogError: wrong shape, codes out of range, or a SID that is taken.
        """
        sids = np.asarray(sids)
        if sids.ndim != 2 or sids.shape[1] != self.levels:
            raise CatalogError(f"SIDs must have shape [M, {self.levels}], got {sids.shape}")
        count = len(sids)
        bits = np.ones(count, dtype=np.bool_) if available is None else available
        if bits.shape != (count,):
            raise CatalogError(f"{bits.shape} availability bits for {count} items")
        if not count:
            return self
        _check_codes(sids)
        order = np.lexsort(sids.T[::-1])
        added = sids[order].astype(np.int32)
        nodes, found, at = self._locate(added)
        differs = (added[1:] != added[:-1]).cumsum(axis=1) > 0
        if bool(found[:, -1].any()) or not bool(differs[:, -1].all()):
            raise CatalogError("two items share a SID")
        place = at + np.arange(count)
        starts, codes, max_children = [], [], list(self.max_children)
        parents = np.array([[0, len(self) + count]] * count, dtype=np.int32)
        for level in range(self.levels):
            node, known = nodes[:, level], found[:, level]
            new = ~known
            new[1:] &= differs[:, level]
            values = added[:, level].astype(np.int64)
            column = self.codes[level]
            codes.append(spliced(column, node[new], values=values[new]) if new.any() else column)
            # Where the new item's prefix, old or new, stands among the level's prefixes now.
            own = node + np.cumsum(new) - ~known
            if level < self.levels - 1:
                begins = spliced(
                    self.starts[level], node + known, np.ones(count, np.int64), place, new
                )
                starts.append(begins)
                families = np.diff(np.searchsorted(begins, parents))
                parents = np.stack([begins[own], begins[own + 1]], axis=1)
            else:
                families = np.diff(parents)
            max_children[level] = max(max_children[level], int(families.max()))
        rows = spliced(self.rows, at, values=order.astype(np.int64) + len(self))
        positions = np.empty_like(rows)
        if count == 1:
            np.add(self.positions, self.positions >= np.int32(at[0]), out=positions[:-1])
            positions[-1] = at[0]
        else:
            positions[rows] = np.arange(len(rows), dtype=np.int32)
        more = bits[order].astype(np.int64)
        cumulative = self.base.cumulative
        return ConstraintIndex.__new__(ConstraintIndex)._fill(
            rows,
            positions,
            starts,
            codes,
            tuple(max_children),
            tuple(
                max(bound, int(code) + 1)
                for bound, code in zip(self.code_bounds, added.max(axis=0), strict=True)
            ),
            spliced(cumulative, at + 1, more, cumulative[at] + np.cumsum(more)),
        )

    def _locate(self, sids: IntArray) -> tuple[LongArray, BoolArray, LongArray]:
        """Where SIDs [M, L] stand or would stand: per level their prefix's number among the level's
        prefixes [M, L] and whether it exists [M, L]; and the sorted position [M]."""
        count = len(sids)
        nodes = np.empty((count, self.levels), dtype=np.int64)
        found = np.empty((count, self.levels), dtype=np.bool_)
        ends = np.array([[0, len(self)]] * count, dtype=np.int32)
        for level in range(self.levels):
            inner = level < self.levels - 1
            slices = np.searchsorted(self.starts[level], ends) if inner else ends.astype(np.int64)
            left, right = slices[:, 0].copy(), slices[:, 1].copy()
            column, wanted = self.codes[level], sids[:, level]
            for _ in range(self.max_children[level].bit_length()):
                open_, middle = left < right, (left + right) // 2
                less = column[middle] < wanted
                left = np.where(open_ & less, middle + 1, left)
                right = np.where(open_ & ~less, middle, right)
            nodes[:, level] = left
            found[:, level] = (left < slices[:, 1]) & (column[left] == wanted)
            # A prefix that does not exist is an empty range where it would stand.
            edge = np.stack([left, left + found[:, level]], axis=1)
            ends = self.starts[level][edge] if inner else edge.astype(np.int32)
        return nodes, found, ends[:, 0].astype(np.int64)


def _check_codes(sids: IntArray) -> None:
    if int(sids.min()) < 0:
        raise CatalogError("codes must not be negative")
    if int(sids.max()) >= 2**31 - 1:
        raise CatalogError("codes must be below 2^31 - 1")


def _prefix_sum(bits: BoolArray) -> IntArray:
    total = np.zeros(len(bits) + 1, dtype=np.int32)
    np.cumsum(bits, out=total[1:])
    return total


def admissible_children_oracle(
    sids: Iterable[Sid], prefix: Sid, excluded: frozenset[Sid] = frozenset()
) -> list[int]:
    """Plain-Python oracle: codes that lead from ``prefix`` to an item outside ``excluded``."""
    depth = len(prefix)
    return sorted({sid[depth] for sid in sids if sid[:depth] == prefix and sid not in excluded})
