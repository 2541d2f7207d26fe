from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.errors import DataError
from gti_core.evaluation import metrics
from gti_core.evaluation.metrics import (
    Interval,
    evaluate_rankings,
    ndcg_at_k,
    paired_bootstrap,
    per_case_metrics,
    ranks_of_targets,
    recall_at_k,
)

RANKINGS = np.array([[3, 1, 2], [1, 2, 3], [2, 3, -1], [0, -1, -1]])
TARGETS = np.array([3, 3, 1, 5])


def test_doctests() -> None:
    assert doctest.testmod(metrics).failed == 0


def test_ranks_by_hand() -> None:
    ranks = ranks_of_targets(RANKINGS, TARGETS)

    assert ranks.tolist() == [1, 3, 0, 0]
    assert ranks.dtype == np.int64


def test_values_by_hand() -> None:
    ranks = np.array([1, 2, 3, 10, 11, 0])

    assert recall_at_k(ranks, 10).tolist() == [1, 1, 1, 1, 0, 0]
    assert ndcg_at_k(ranks, 10) == pytest.approx([1, 0.63092975, 0.5, 0.28906483, 0, 0])
    assert ndcg_at_k(ranks, 1).tolist() == [1, 0, 0, 0, 0, 0]


def test_evaluation_by_hand() -> None:
    assert evaluate_rankings(RANKINGS, TARGETS, ks=(1, 3)) == {
        "recall@1": 0.25,
        "recall@3": 0.5,
        "ndcg@1": 0.25,
        "ndcg@3": 0.375,
    }


def test_per_case_values_keep_the_order_of_cases() -> None:
    values = per_case_metrics(RANKINGS, TARGETS, ks=(3,))

    assert values["recall@3"].tolist() == [1, 1, 0, 0]
    assert values["ndcg@3"].tolist() == [1, 0.5, 0, 0]


@given(st.integers(1, 30), st.integers(1, 30))
def test_metrics_agree_with_the_definition(rank: int, k: int) -> None:
    ranking = np.arange(100, 130)[None]
    ranks = ranks_of_targets(ranking, np.array([99 + rank]))

    gains = [1.0 if place == rank else 0.0 for place in range(1, k + 1)]
    assert recall_at_k(ranks, k)[0] == sum(gains)
    discounted = sum(gain / np.log2(place + 2) for place, gain in enumerate(gains))
    assert ndcg_at_k(ranks, k)[0] == pytest.approx(discounted)


@pytest.mark.parametrize(
    ("rankings", "targets"),
    [
        (np.array([[1, 2, 1]]), np.array([1])),
        (np.array([[1, 2]]), np.array([1, 2])),
        (np.array([1, 2]), np.array([1, 2])),
        (np.array([[1.0, 2.0]]), np.array([1])),
        (np.array([[1, -1]]), np.array([-1])),
    ],
)
def test_wrong_rankings_are_refused(rankings: np.ndarray, targets: np.ndarray) -> None:
    with pytest.raises(DataError):
        ranks_of_targets(rankings, targets)


def test_empty_lists_hold_no_target() -> None:
    assert ranks_of_targets(np.empty((2, 0), dtype=int), np.array([0, 1])).tolist() == [0, 0]


def test_cut_offs_are_checked() -> None:
    with pytest.raises(DataError, match="cut-offs"):
        evaluate_rankings(RANKINGS, TARGETS, ks=(4,))
    with pytest.raises(DataError, match="cut-offs"):
        evaluate_rankings(RANKINGS, TARGETS, ks=())
    with pytest.raises(DataError, match="at least 1"):
        recall_at_k(np.array([1]), 0)
    with pytest.raises(DataError, match="no case"):
        evaluate_rankings(np.empty((0, 5), dtype=int), np.empty(0, dtype=int), ks=(5,))


def test_bootstrap_of_a_constant_difference_has_no_width() -> None:
    values = np.array([0.0, 0.25, 1.0])

    assert paired_bootstrap(values + 0.5, values) == Interval(0.5, 0.5, 0.5, 0.95)


def test_bootstrap_pairs_the_cases() -> None:
    rng = np.random.default_rng(7)
    shared = rng.normal(0, 100, 400)
    first = shared + rng.normal(1.0, 1.0, 400)

    interval = paired_bootstrap(first, shared, seed=3)

    # The standard error of the paired difference is 1 / 20; unpaired it would be about 7.
    assert interval.low < interval.difference < interval.high
    assert interval.high - interval.low == pytest.approx(2 * 1.96 / 20, rel=0.15)
    assert interval == paired_bootstrap(first, shared, seed=3)
    wider = paired_bootstrap(first, shared, confidence=0.99, seed=3)
    assert wider.high - wider.low > interval.high - interval.low


def test_bootstrap_of_two_cases_by_hand() -> None:
    # Resampled means of (0, 1) are 0, 1/2, 1 with odds 1:2:1.
    interval = paired_bootstrap(np.array([1.0, 1.0]), np.array([1.0, 0.0]), confidence=0.4)

    assert (interval.difference, interval.low, interval.high) == (0.5, 0.5, 0.5)
    wide = paired_bootstrap(np.array([1.0, 1.0]), np.array([1.0, 0.0]), confidence=0.6)
    assert (wide.low, wide.high) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(np.ones(3), np.ones(4)), (np.ones(1), np.ones(1)), (np.ones((2, 2)), np.ones((2, 2)))],
)
def test_bootstrap_refuses(first: np.ndarray, second: np.ndarray) -> None:
    with pytest.raises(DataError):
        paired_bootstrap(first, second)
