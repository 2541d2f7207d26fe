"""One distinct SID per item."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gti_core.errors import CatalogError
from gti_core.quantizer.assign import assign_unique, quantization_report
from gti_core.quantizer.kmeans import ResidualKMeans, fit_residual_kmeans
from gti_core.types import FloatArray


def line(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32)[:, None]


def test_no_collision_changes_nothing() -> None:
    quantizer = ResidualKMeans([line(0, 100), line(0, 1, 2)])
    vectors = line(0, 1, 2, 100, 101)
    assert assign_unique(quantizer, vectors).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]


def test_collision_takes_the_cheapest_free_code() -> None:
    # Items at 0.1 and 0.4 both want code 0 of the same prefix; code 1 (at 1) costs
    # 0.81 - 0.01 = 0.80 more for the first and 0.36 - 0.16 = 0.20 more for the second.
    quantizer = ResidualKMeans([line(0, 100), line(0, 1, 5)])
    assert assign_unique(quantizer, line(0.1, 0.4)).tolist() == [[0, 0], [0, 1]]
    assert assign_unique(quantizer, line(0.4, 0.1)).tolist() == [[0, 1], [0, 0]]


def test_item_without_collision_keeps_its_code_even_if_moving_it_were_cheaper() -> None:
    # 0 and 0 collide on code 0; 3.1 alone wants code 1 (at 3) and would only lose a little at
    # code 2 (at 3.4), far less than the 0 that goes there. It stays all the same.
    quantizer = ResidualKMeans([line(0, 100), line(0, 3, 3.4)])
    assigned = assign_unique(quantizer, line(0, 0, 3.1)).tolist()
    assert assigned[2] == [0, 1]
    assert sorted(assigned[:2]) == [[0, 0], [0, 2]]


def test_surplus_that_loses_least_moves_to_the_next_prefix() -> None:
    # Two codes per prefix, three items under prefix 0 (at 0). Prefix 1 lies at 10: moving costs
    # 100 - 0 for item 0, 81 - 1 for item 1, 36 - 16 for item 2, so item 2 goes.
    quantizer = ResidualKMeans([line(0, 10), line(0, 1)])
    assert assign_unique(quantizer, line(0, 1, 4)).tolist() == [[0, 0], [0, 1], [1, 0]]


def test_loss_counts_and_not_the_distance_alone() -> None:
    # Prefix 1 lies at (10, 0): 81 from item 1 and 117 from item 2, but they are 1 and 97 from
    # prefix 0, so item 2 loses 20 and item 1 would lose 80.
    books = [[[0, 0], [10, 0]], [[0, 0], [1, 0]]]
    quantizer = ResidualKMeans([np.array(book, dtype=np.float32) for book in books])
    vectors = np.array([[0, 0], [1, 0], [4, 9]], dtype=np.float32)
    assert assign_unique(quantizer, vectors).tolist() == [[0, 0], [0, 1], [1, 0]]


def test_newcomers_do_not_displace_items_that_collide_with_nobody() -> None:
    # Item 2 must leave prefix 0; under prefix 1 its nearest code is 0, which item 3 holds.
    quantizer = ResidualKMeans([line(0, 10), line(-1, 1)])
    assigned = assign_unique(quantizer, line(-1, 1, 4, 9)).tolist()
    assert assigned == [[0, 0], [0, 1], [1, 1], [1, 0]]


def test_full_prefixes_are_passed_over() -> None:
    # Prefix 1 (at 10) is full with its own two, so the surplus of prefix 0 goes on to prefix 2.
    quantizer = ResidualKMeans([line(0, 10, 20), line(0, 1)])
    assigned = assign_unique(quantizer, line(0, 1, 4, 10, 11)).tolist()
    assert assigned == [[0, 0], [0, 1], [2, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize("sizes", [(10,), (2, 5), (5, 2), (2, 2, 3), (1, 1, 10), (10, 1)])
def test_ten_equal_vectors_get_ten_sids(sizes: tuple[int, ...]) -> None:
    vectors = np.ones((10, 3), dtype=np.float32)
    quantizer = fit_residual_kmeans(vectors, sizes, seed=0)
    assigned = assign_unique(quantizer, vectors)
    assert len({tuple(row) for row in assigned.tolist()}) == 10
    report = quantization_report(quantizer, vectors, assigned)
    assert report["collision_rate"] == 1.0
    assert report["moved_share"] == 0.9
    assert report["reconstruction_error"] is None


def test_more_items_than_sids_are_refused() -> None:
    quantizer = ResidualKMeans([line(0, 10), line(0, 1)])
    assert len(assign_unique(quantizer, line(0, 0, 0, 0))) == 4
    with pytest.raises(CatalogError, match=r"5 items do not fit into 4 semantic IDs .*\[2, 2\]"):
        assign_unique(quantizer, line(0, 0, 0, 0, 0))


INTEGERS = st.integers(-6, 6).map(float)


@st.composite
def crowded(draw: st.DrawFn) -> tuple[ResidualKMeans, FloatArray]:
    """Few codes, many equal points: collisions and overfull prefixes are the rule."""
    width = draw(st.integers(1, 2))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    books = [draw(hnp.arrays(np.float32, (size, width), elements=INTEGERS)) for size in sizes]
    count = draw(st.integers(1, math.prod(sizes)))
    return ResidualKMeans(books), draw(
        hnp.arrays(np.float32, (count, width), elements=INTEGERS, fill=st.just(0.0))
    )


@given(crowded())
def test_assignment_is_distinct_in_range_and_gentle(
    case: tuple[ResidualKMeans, FloatArray],
) -> None:
    quantizer, vectors = case
    assigned = assign_unique(quantizer, vectors)
    nearest = quantizer.quantize(vectors)
    assert assigned.dtype == np.int32
    assert assigned.shape == nearest.shape
    assert len({tuple(row) for row in assigned.tolist()}) == len(vectors)
    assert (assigned >= 0).all()
    assert (assigned < np.array(quantizer.sizes)).all()
    np.testing.assert_array_equal(assigned, assign_unique(quantizer, vectors))

    own = [tuple(row) for row in nearest.tolist()]
    room = quantizer.sizes[-1]
    for row, sid in enumerate(own):
        prefix_full = sum(other[:-1] == sid[:-1] for other in own) > room
        if own.count(sid) == 1 and not prefix_full:
            assert tuple(assigned[row]) == sid
        if not prefix_full:
            assert tuple(assigned[row, :-1]) == sid[:-1]
    for prefix in {sid[:-1] for sid in own}:
        if sum(sid[:-1] == prefix for sid in own) > room:
            assert sum(tuple(row[:-1]) == prefix for row in assigned.tolist()) == room


@given(st.lists(st.integers(-10, 10), min_size=1, max_size=4), st.integers(0, 1000))
def test_within_a_prefix_the_total_distance_is_minimal(values: list[int], seed: int) -> None:
    book = np.random.default_rng(seed).integers(-10, 10, (5, 1)).astype(np.float32)
    quantizer = ResidualKMeans([line(0), book])
    vectors = line(*map(float, values))
    cost = (vectors - book.T) ** 2
    nearest = quantizer.quantize(vectors)[:, 1]

    def key(codes: tuple[int, ...]) -> tuple[int, float]:
        moved = sum(code != own for code, own in zip(codes, nearest, strict=True))
        return moved, float(sum(cost[row, code] for row, code in enumerate(codes)))

    best = min(key(codes) for codes in itertools.permutations(range(5), len(values)))
    assigned = assign_unique(quantizer, vectors)[:, 1]
    assert key(tuple(assigned.tolist())) == best


def test_prefix_search_goes_beyond_its_first_width() -> None:
    # 100 prefixes of one SID each and 100 equal items: the last ones must go far.
    quantizer = ResidualKMeans([line(*map(float, range(100))), line(0)])
    assigned = assign_unique(quantizer, line(*[0.0] * 100))
    assert sorted(assigned[:, 0].tolist()) == list(range(100))


def test_report_worked_by_hand() -> None:
    # Own SIDs: (0,0), (0,0), (0,1), (1,0); the second moves to (0,2).
    quantizer = ResidualKMeans([line(0, 10), line(0, 1, 3, 9)])
    vectors = line(0, 0, 1, 10)
    report = quantization_report(quantizer, vectors)
    assert report["items"] == 4
    assert report["sizes"] == [2, 4]
    assert report["utilization"] == [1.0, 0.5]
    # Frequencies 3/4, 1/4 on both levels: entropy 2 - 0.75 log2(3) bits.
    assert report["entropy_bits"] == pytest.approx([2 - 0.75 * math.log2(3)] * 2)
    assert report["perplexity"] == pytest.approx([4 / 3**0.75] * 2)
    assert report["collision_rate"] == 0.5
    assert report["moved_share"] == 0.25
    assert report["moved_prefix_share"] == 0.0
    assert report["reconstruction_error"] == 0.0
    # Mean 2.75, squares 2 * 7.5625 + 3.0625 + 52.5625 = 70.75; the moved item is off by 3.
    assert report["assigned_reconstruction_error"] == pytest.approx(9 / 70.75)


def test_single_level_report_has_no_moved_prefix() -> None:
    report = quantization_report(ResidualKMeans([line(0, 1)]), line(0, 0))
    assert report["moved_prefix_share"] == 0.0
    assert report["moved_share"] == 0.5


def test_many_equal_items_are_placed_quickly() -> None:
    rng = np.random.default_rng(0)
    quantizer = ResidualKMeans(
        [rng.normal(size=(size, 8)).astype(np.float32) for size in (16, 16, 16)]
    )
    vectors = np.zeros((1000, 8), dtype=np.float32)
    start = time.process_time()
    assigned = assign_unique(quantizer, vectors)
    assert time.process_time() - start < 20.0
    assert len(np.unique(assigned, axis=0)) == 1000
