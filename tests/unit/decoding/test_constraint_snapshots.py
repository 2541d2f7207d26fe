"""Snapshots of the constraint index: the next one without a rebuild, and requests' filters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.decoding.constraint import ConstraintIndex, admissible_children_oracle
from gti_core.decoding.splice import spliced
from gti_core.errors import CatalogError, DecodingError


@st.composite
def catalogues(draw, least=1):
    """Distinct SIDs [N, L] in random order: deep or shallow, crowded or scattered."""
    levels = draw(st.sampled_from([1, 2, 3, 4, 8]))
    codes = draw(st.sampled_from([2, 5, 65_536]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sids = rng.integers(0, codes, size=(draw(st.integers(least, 50)), levels), dtype=np.int32)
    if codes == 65_536:  # nearly nothing would be shared
        sids[:, : levels // 2] %= 3
    sids = np.unique(sids, axis=0)
    return sids[rng.permutation(len(sids))]


def arrays(index):
    return (index.rows, index.positions, index.base.cumulative, *index.starts, *index.codes)


def assert_same(one, other):
    assert len(arrays(one)) == len(arrays(other))
    for left, right in zip(arrays(one), arrays(other), strict=True):
        assert left.dtype == right.dtype == np.int32
        assert left.tolist() == right.tolist()
    assert one.max_children == other.max_children
    assert one.code_bounds == other.code_bounds


def tuples(sids):
    return [tuple(int(code) for code in sid) for sid in sids]


def test_the_arrays_of_a_catalogue_worked_out_by_hand():
    sids = np.array([[1, 0, 2], [0, 7, 1], [0, 3, 3], [0, 7, 0]], dtype=np.int32)
    index = ConstraintIndex(sids, np.array([True, False, True, True]))
    assert index.rows.tolist() == [2, 3, 1, 0]
    assert index.positions.tolist() == [3, 2, 0, 1]
    assert [array.tolist() for array in index.starts] == [[0, 3, 4], [0, 1, 3, 4]]
    assert [array.tolist() for array in index.codes] == [[0, 1, 0], [3, 7, 0, 0], [3, 0, 1, 2, 0]]
    assert index.base.cumulative.tolist() == [0, 1, 2, 2, 3]
    assert index.max_children == (2, 2, 2)
    assert index.code_bounds == (2, 8, 4)
    assert index.available.tolist() == [True, False, True, True]
    assert index.sids.tolist() == [[0, 3, 3], [0, 7, 0], [0, 7, 1], [1, 0, 2]]
    assert index.nbytes == 4 * (4 + 4 + 5 + 3 + 4 + 3 + 4 + 5)
    children = index.children(0, 3, 1, index.admissible())
    assert (children.codes.tolist(), children.lo.tolist(), children.hi.tolist()) == (
        [3, 7],
        [0, 1],
        [1, 3],
    )
    assert index.retired(3).children(0, 3, 1, index.retired(3).base).codes.tolist() == [3]


@given(catalogues(least=2), st.data())
def test_insertions_one_by_one_equal_a_fresh_build(sids, data):
    split = data.draw(st.integers(1, len(sids)))
    bits = np.array(data.draw(st.lists(st.booleans(), min_size=len(sids), max_size=len(sids))))
    index = ConstraintIndex(sids[:split], bits[:split])
    for sid, available in zip(tuples(sids[split:]), bits[split:], strict=True):
        index = index.inserted(sid, bool(available))
    assert_same(index, ConstraintIndex(sids, bits))


@given(catalogues(least=2), st.data())
def test_insertions_together_equal_a_fresh_build(sids, data):
    split = data.draw(st.integers(1, len(sids)))
    bits = np.array(data.draw(st.lists(st.booleans(), min_size=len(sids), max_size=len(sids))))
    index = ConstraintIndex(sids[:split], bits[:split]).inserted_many(sids[split:], bits[split:])
    assert_same(index, ConstraintIndex(sids, bits))
    everything = ConstraintIndex(sids[:split]).inserted_many(sids[split:])
    assert_same(everything, ConstraintIndex(sids))


@given(catalogues(least=2), st.data())
def test_a_history_of_changes_equals_a_fresh_build_and_leaves_older_snapshots_alone(sids, data):
    split = data.draw(st.integers(1, len(sids)))
    waiting = tuples(sids[split:])
    index = ConstraintIndex(sids[:split])
    live = [True] * split
    past = [(index, list(live), [array.copy() for array in arrays(index)])]
    for change in data.draw(st.lists(st.sampled_from("irs"), max_size=12)):
        if change == "i" and waiting:
            index = index.inserted(waiting.pop(0))
            live.append(True)
        elif change != "i":
            row = data.draw(st.integers(0, len(index) - 1))
            index = index.retired(row) if change == "r" else index.restored(row)
            live[row] = change == "s"
        past.append((index, list(live), [array.copy() for array in arrays(index)]))
    for snapshot, bits, copies in past:
        assert_same(snapshot, ConstraintIndex(sids[: len(bits)], np.array(bits)))
        assert snapshot.available.tolist() == bits
        assert all(
            (left == right).all() for left, right in zip(arrays(snapshot), copies, strict=True)
        )


def test_what_does_not_change_is_shared_and_nothing_can_be_written():
    sids = np.array([[0, 0, 0], [0, 0, 1], [1, 4, 2]], dtype=np.int32)
    index = ConstraintIndex(sids)
    retired = index.retired(1)
    assert retired.rows is index.rows
    assert retired.codes is index.codes
    assert retired.retired(1) is retired
    assert index.restored(1) is index
    grown = index.inserted((0, 0, 2))
    assert grown.codes[0] is index.codes[0]
    assert grown.codes[1] is index.codes[1]
    assert grown.inserted_many(np.empty((0, 3), dtype=np.int32)) is grown
    assert len({index.snapshot, retired.snapshot, grown.snapshot}) == 3
    for snapshot in (index, retired, grown):
        for array in (*arrays(snapshot), snapshot.sids):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_several_rows_change_at_once_whatever_their_state_and_order():
    index = ConstraintIndex(np.array([[3], [1], [2], [0]], dtype=np.int32)).retired(2)
    assert index.with_availability([0, 2, 0], False).available.tolist() == [False, True] * 2
    assert index.with_availability([], False) is index
    assert index.with_availability([3, 2], True).available.all()


@pytest.mark.parametrize(
    ("sids", "message"),
    [
        ([[0, 1]], "share"),
        ([[5, 5], [5, 5]], "share"),
        ([[5, 5], [6, 5], [5, 5]], "share"),
        ([[-1, 0]], "negative"),
        ([[0, 2**31 - 1]], "below"),
        ([[1, 2, 3]], "shape"),
        ([1, 2], "shape"),
    ],
)
def test_an_insertion_that_is_no_new_item_is_refused(sids, message):
    index = ConstraintIndex(np.array([[0, 1], [4, 1]], dtype=np.int32)).retired(0)
    with pytest.raises(CatalogError, match=message):
        index.inserted_many(np.array(sids))


def test_availability_bits_of_another_length_are_refused():
    sids = np.array([[0, 1], [4, 1]], dtype=np.int32)
    with pytest.raises(CatalogError, match="availability"):
        ConstraintIndex(sids, np.array([True]))
    with pytest.raises(CatalogError, match="availability"):
        ConstraintIndex(sids).inserted_many(np.array([[9, 9]]), np.array([True, True]))


def a_filter(index, data):
    """A filter and, worked out row by row, the rows it admits."""
    rows = list(range(len(index)))
    excluded = data.draw(st.lists(st.sampled_from(rows)))
    included = data.draw(st.none() | st.lists(st.sampled_from(rows)))
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    base = None if mask is None else index.selection(np.array(mask))
    admitted = {
        row
        for row in rows
        if index.available[row]
        and row not in excluded
        and (included is None or row in included)
        and (mask is None or mask[row])
    }
    return index.filter(excluded, included, base), admitted


@given(catalogues(), st.data())
def test_a_filter_counts_and_admits_what_its_parts_say(sids, data):
    bits = np.array(data.draw(st.lists(st.booleans(), min_size=len(sids), max_size=len(sids))))
    index = ConstraintIndex(sids, bits)
    chosen, admitted = a_filter(index, data)
    assert chosen.total == len(admitted)
    lo, hi = sorted(data.draw(st.tuples(*[st.integers(0, len(sids))] * 2)))
    inside = [row for row in index.rows[lo:hi].tolist() if row in admitted]
    assert chosen.count(lo, hi) == len(inside)
    every = tuples(sids)
    hidden = frozenset(every[row] for row in range(len(every)) if row not in admitted)
    ranges = {(): (0, len(sids))}
    for level in range(index.levels):
        following = {}
        for prefix, (first, last) in ranges.items():
            children = index.children(first, last, level, chosen)
            assert children.codes.tolist() == admissible_children_oracle(every, prefix, hidden)
            for code, low, high in zip(*vars(children).values(), strict=True):
                following[(*prefix, int(code))] = (int(low), int(high))
        ranges = following
    assert set(ranges) == set(every) - hidden
    dense = index.admissible(row for row in range(len(every)) if row not in admitted)
    assert dense.total == len(admitted)
    assert dense.count(lo, hi) == len(inside)


@pytest.mark.parametrize("row", [-1, 2, 2**40])
def test_a_row_outside_the_catalogue_is_refused(row):
    index = ConstraintIndex(np.array([[0], [1]], dtype=np.int32))
    for call in (
        lambda: index.filter([0, row]),
        lambda: index.filter(included_rows=[row]),
        lambda: index.admissible([row]),
        lambda: index.retired(row),
        lambda: index.restored(row),
    ):
        with pytest.raises(DecodingError, match=f"no catalogue row {row}"):
            call()


def test_a_selection_serves_its_own_snapshot_only():
    # The next snapshot has as many items: by its length alone the old selection would pass, and
    # would bring the retired item back.
    index = ConstraintIndex(np.array([[0], [1]], dtype=np.int32))
    selection = index.selection(np.array([True, True]))
    with pytest.raises(DecodingError, match="another snapshot"):
        index.retired(0).filter(base=selection)
    with pytest.raises(DecodingError, match="shape"):
        index.selection(np.array([True]))


def test_splicing_adds_and_inserts_where_it_is_told():
    array = np.array([10, 20, 30], dtype=np.int32)
    at, added = np.array([0, 2, 2, 3]), np.array([1, 0, 5, 7])
    values, insert = np.array([1, 2, 3, 4]), np.array([True, True, False, True])
    assert spliced(array, at, added, values, insert).tolist() == [1, 11, 21, 2, 36, 4]
    assert spliced(array, at[:1]).tolist() == [10, 20, 30]
