"""The constraint index against its plain-Python oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.decoding.constraint import ConstraintIndex, admissible_children_oracle
from gti_core.errors import CatalogError

sid_sets = st.integers(1, 4).flatmap(
    lambda levels: st.lists(
        st.tuples(*[st.integers(0, 4)] * levels), min_size=1, max_size=40, unique=True
    )
)


def walk(index, admissible, prefix):
    lo, hi = 0, len(index)
    for level, code in enumerate(prefix):
        children = index.children(lo, hi, level, admissible)
        place = list(children.codes).index(code)
        lo, hi = int(children.lo[place]), int(children.hi[place])
    return lo, hi


@given(sid_sets, st.data())
def test_children_equal_the_oracle_under_any_exclusion(sids, data):
    excluded = data.draw(st.sets(st.sampled_from(sids)))
    index = ConstraintIndex(np.array(sids, dtype=np.int32))
    admissible = index.admissible([sids.index(sid) for sid in excluded])
    frontier = [()]
    for level in range(index.levels):
        following = []
        for prefix in frontier:
            expected = admissible_children_oracle(sids, prefix, frozenset(excluded))
            if level or admissible.total:
                lo, hi = walk(index, admissible, prefix)
                children = index.children(lo, hi, level, admissible)
                assert list(children.codes) == expected
            following += [(*prefix, code) for code in expected]
        frontier = following
    assert set(frontier) == set(sids) - excluded


@given(sid_sets)
def test_rows_and_positions_are_inverse_and_sorted(sids):
    index = ConstraintIndex(np.array(sids, dtype=np.int32))
    assert [tuple(int(c) for c in row) for row in index.sids] == sorted(sids)
    assert [sids[row] for row in index.rows] == sorted(sids)
    assert list(index.rows[index.positions]) == list(range(len(sids)))


def test_a_range_without_admissible_items_counts_zero():
    index = ConstraintIndex(np.array([[0, 0], [0, 1], [1, 0]], dtype=np.int32))
    admissible = index.admissible([0, 1, 1])
    assert admissible.total == 1
    assert admissible.count(0, 2) == 0
    assert list(index.children(0, 3, 0, admissible).codes) == [1]


@pytest.mark.parametrize(
    "sids",
    [
        np.zeros((0, 2), dtype=np.int32),
        np.array([[1, 2], [1, 2]], dtype=np.int32),
        np.array([[-1, 2]], dtype=np.int32),
        np.array([1, 2], dtype=np.int32),
    ],
)
def test_refuses_what_is_no_catalogue(sids):
    with pytest.raises(CatalogError):
        ConstraintIndex(sids)
