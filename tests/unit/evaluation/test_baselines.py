from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.errors import DataError
from gti_core.evaluation.baselines import ItemKnn, Popularity, Ranker

# Users by item: 0 -> {0, 1, 3}, 1 -> {0, 1}, 2 -> {1, 2}, 3 -> {2}, 4 -> {}.
TRAIN = [[0, 1], [0, 1, 2], [2, 3], [0]]


def test_popularity_by_hand() -> None:
    ranker: Ranker = Popularity(TRAIN, 5)

    assert ranker.rank([[], [0], [2, 0]], 3).tolist() == [[0, 1, 2], [1, 2, 3], [1, 3, 4]]
    assert ranker.rank([[0]], 3, exclude_seen=False).tolist() == [[0, 1, 2]]


def test_short_lists_are_padded() -> None:
    for ranker in (Popularity(TRAIN, 5), ItemKnn(TRAIN, 5)):
        assert ranker.rank([[0, 1, 2]], 4).tolist() == [[3, 4, -1, -1]]
        assert ranker.rank([[0]], 7, exclude_seen=False)[0, 5:].tolist() == [-1, -1]
        assert ranker.rank([], 3).shape == (0, 3)


def test_item_knn_cosine_by_hand() -> None:
    # cos(0, 1) = 2 / sqrt(6), cos(0, 2) = 1 / sqrt(6), cos(1, 2) = 1/2, cos(2, 3) = 1 / sqrt(2).
    ranker: Ranker = ItemKnn(TRAIN, 5, neighbours=4)

    assert ranker.rank([[0]], 4).tolist() == [[1, 2, 3, 4]]
    assert ranker.rank([[2]], 4).tolist() == [[3, 1, 0, 4]]
    # 2: 0.41 + 0.5 = 0.91; then the items without a score, by popularity.
    assert ranker.rank([[0, 1]], 3).tolist() == [[2, 3, 4]]
    # Never its own neighbour: 0 comes back only for want of any score.
    assert ranker.rank([[0]], 5, exclude_seen=False).tolist() == [[1, 2, 0, 3, 4]]


def test_only_the_nearest_neighbours_count() -> None:
    # Of item 2's neighbours only 3 is kept, so 0 and 1 have no score and go by popularity.
    assert ItemKnn(TRAIN, 5, neighbours=1).rank([[2]], 4).tolist() == [[3, 0, 1, 4]]


def test_half_life_prefers_the_neighbours_of_the_last_item() -> None:
    # Two neighbours of equal similarity, 10 of item 0 and 11 of items 1 and 2.
    train = [[0, 10], [1, 11], [2, 11]]
    # cos(0, 10) = 1, cos(1, 11) = cos(2, 11) = 1 / sqrt(2), together 1.41.
    assert ItemKnn(train, 12).rank([[1, 2, 0]], 1).tolist() == [[11]]
    # Weights 1/4, 1/2, 1: 11 has 0.75 / sqrt(2) = 0.53 against 1.
    assert ItemKnn(train, 12, half_life=1.0).rank([[1, 2, 0]], 1).tolist() == [[10]]
    # The other way round 0 weighs 1/4, and 11 has 1.5 / sqrt(2).
    assert ItemKnn(train, 12, half_life=1.0).rank([[0, 1, 2]], 1).tolist() == [[11]]


def test_a_repeated_item_counts_once_with_its_last_weight() -> None:
    train = [[0, 10], [1, 11], [2, 11]]

    # Counted twice, item 0 would win with 2 against 1.41.
    assert ItemKnn(train, 12).rank([[0, 0, 1, 2]], 1).tolist() == [[11]]
    assert ItemKnn(train, 12, half_life=1.0).rank([[0, 1, 2, 0]], 1).tolist() == [[10]]


@pytest.mark.parametrize("weighting", ["cosine", "tfidf", "bm25"])
def test_weightings_find_the_partner(weighting: Any) -> None:
    train = [[a, a + 1] for a in range(0, 20, 2) for _ in range(3)] + [list(range(20))]

    ranker = ItemKnn(train, 20, neighbours=3, weighting=weighting)

    assert ranker.rank([[4], [9]], 1).tolist() == [[5], [8]]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=6), min_size=1, max_size=8),
    st.lists(st.integers(0, 6), max_size=5),
    st.booleans(),
)
def test_item_knn_agrees_with_dense_cosine(
    train: list[list[int]], history: list[int], exclude_seen: bool
) -> None:
    matrix = np.zeros((len(train), 7))
    for user, items in enumerate(train):
        matrix[user, items] = 1
    norms = np.linalg.norm(matrix, axis=0)
    cosine = matrix.T @ matrix / np.maximum(np.outer(norms, norms), 1e-12)
    np.fill_diagonal(cosine, 0)
    scores = cosine[sorted(set(history))].sum(axis=0)
    allowed = [row for row in range(7) if not (exclude_seen and row in history)]

    ranked = ItemKnn(train, 7, neighbours=7).rank([history], 7, exclude_seen)[0]

    found = [int(row) for row in ranked if row >= 0]
    assert sorted(found) == allowed
    assert scores[found] == pytest.approx(sorted(scores[allowed], reverse=True), abs=1e-9)


def test_many_cases_agree_with_one_at_a_time() -> None:
    rng = np.random.default_rng(1)
    histories = [rng.choice(50, size=5, replace=False).tolist() for _ in range(600)]
    ranker = ItemKnn(histories[:100], 50, neighbours=5, half_life=2.0)

    together = ranker.rank(histories, 10)

    assert together.shape == (600, 10)
    for case in (0, 511, 512, 599):
        assert together[case].tolist() == ranker.rank([histories[case]], 10)[0].tolist()


@pytest.mark.parametrize(
    ("train", "settings"),
    [
        ([[0, 5]], {}),
        ([[-1]], {}),
        ([[0]], {"neighbours": 0}),
        ([[0]], {"half_life": 0.0}),
        ([[0]], {"half_life": float("nan")}),
        ([[0]], {"weighting": "jaccard"}),
    ],
)
def test_bad_settings_are_refused(train: list[list[int]], settings: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        ItemKnn(train, 5, **settings)


@pytest.mark.parametrize("ranker", [Popularity(TRAIN, 5), ItemKnn(TRAIN, 5)])
def test_bad_requests_are_refused(ranker: Ranker) -> None:
    with pytest.raises(DataError):
        ranker.rank([[0]], 0)
    with pytest.raises(DataError):
        ranker.rank([[5]], 2)
    with pytest.raises(DataError):
        ranker.rank([[-1]], 2)
