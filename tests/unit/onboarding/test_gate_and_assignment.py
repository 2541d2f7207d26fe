"""SIDs of new items, and the gate over lists."""

from __future__ import annotations

import numpy as np
import pytest

from gti_core.errors import GroundingError, ReserveExhaustedError
from gti_core.onboarding.assign import (
    Neighbours,
    assign_new,
    nearest_items,
    neighbour_weights,
)
from gti_core.onboarding.choice import VOTERS, best_prefix, candidate_prefixes
from gti_core.onboarding.gate import BatchVerdict, GateOptions, judge
from gti_core.onboarding.probes import ProbeBeams
from gti_core.types import LongArray
from gti_core.vocabulary import SidVocabulary

VOCABULARY = SidVocabulary((4, 4, 8), (4, 4, 4), 10)


def unit(*rows: tuple[float, ...]) -> np.ndarray:
    vectors = np.array(rows, dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_neighbours_come_from_the_rows_allowed() -> None:
    known = unit((1, 0), (0.9, 0.1), (0, 1), (0.5, 0.5))
    near = nearest_items(unit((1, 0)), known, np.array([1, 2, 3]), 2)
    assert near.rows.tolist() == [[1, 3]]
    assert near.similarity[0, 0] > near.similarity[0, 1]
    with pytest.raises(GroundingError):
        nearest_items(unit((1, 0)), known, np.array([], dtype=np.int64), 2)


def test_near_and_popular_items_vote_for_their_prefixes() -> None:
    sids = np.array([[0, 0, 0], [1, 1, 0], [1, 1, 1], [2, 2, 0]], dtype=np.int32)
    near = Neighbours(
        np.array([[0, 1, 2, 3]]), np.array([[0.80, 0.79, 0.79, 0.10]], dtype=np.float32)
    )
    equal = neighbour_weights(near, np.zeros(4, np.float32))
    votes = candidate_prefixes(sids, near.rows[0], equal[0])
    assert max(votes, key=lambda prefix: votes[prefix]) == (1, 1)
    assert sum(votes.values()) == pytest.approx(1.0)
    loved = neighbour_weights(near, np.array([900, 1, 1, 10_000], np.float32))
    votes = candidate_prefixes(sids, near.rows[0], loved[0])
    assert max(votes, key=lambda prefix: votes[prefix]) == (0, 0), "far items have no voice"


def test_items_beyond_the_voters_are_candidates_without_a_vote() -> None:
    sids = np.array([[n, 0, 0] for n in range(VOTERS + 3)], dtype=np.int32)
    weights = np.ones(VOTERS + 3, dtype=np.float32)
    votes = candidate_prefixes(sids, np.arange(VOTERS + 3), weights)
    assert len(votes) == VOTERS + 3
    assert votes[(VOTERS, 0)] == 0.0
    assert votes[(0, 0)] == pytest.approx(1 / VOTERS)


def test_the_beams_decide_between_candidates() -> None:
    prefixes = np.array([[[5, 5], [1, 1]], [[2, 2], [1, 1]], [[9, 9], [9, 8]]], dtype=np.int32)
    scores = np.array([[-1, -2], [-1, -2], [-1, -np.inf]], dtype=np.float32)
    empty = np.zeros((3, 2, 1), dtype=np.float32)
    beams = ProbeBeams(
        prefixes, scores, empty, scores, np.full(3, -1, dtype=np.int64), (frozenset(),) * 3
    )
    both, none = np.array([0, 1]), np.array([], dtype=np.int64)
    assert best_prefix(beams, both, none, {(1, 1): 0.0, (2, 2): 0.0}) == (1, 1)
    assert best_prefix(beams, both, none, {(1, 1): 0.0, (2, 2): 0.5}) == (2, 2), "votes count too"
    assert best_prefix(beams, np.array([1]), none, {(1, 1): 0.0, (2, 2): 0.0}) == (2, 2)
    assert best_prefix(beams, np.array([2]), none, {(9, 8): 0.0, (3, 3): 0.1}) == (3, 3)
    assert best_prefix(beams, none, none, {(3, 3): 0.1, (4, 4): 0.9}) == (4, 4)
    # Histories are for known neighbours' prefixes only; the text brings its own.
    assert best_prefix(beams, np.array([0]), none, {(3, 3): 0.1}) == (3, 3)
    assert best_prefix(beams, none, np.array([0]), {(3, 3): 0.1}) == (5, 5)
    assert best_prefix(beams, np.array([1]), np.array([0]), {(1, 1): 0.0}) == (1, 1)


def test_every_item_gets_a_code_of_its_own() -> None:
    sids, vocabulary = assign_new([(0, 0), (3, 3), (0, 0)], VOCABULARY, 4)
    assert sids == [(0, 0, 4), (3, 3, 5), (0, 0, 6)]
    assert vocabulary.active == (4, 4, 7)
    assert not vocabulary.skipped


def test_codes_that_another_branch_has_used_are_skipped() -> None:
    sids, vocabulary = assign_new([(0, 0)], VOCABULARY, 6)
    assert sids == [(0, 0, 6)]
    assert vocabulary.skipped == {(2, 4), (2, 5)}
    assert vocabulary.is_active((0, 0, 6))
    assert not vocabulary.is_active((0, 0, 5))


def test_an_empty_reserve_is_told_before_any_work() -> None:
    with pytest.raises(ReserveExhaustedError) as caught:
        assign_new([(0, 0)] * 3, VOCABULARY, 6)
    assert (caught.value.left, caught.value.wanted) == (2, 3)


def lists(*rows: list[int]) -> LongArray:
    return np.array(rows, dtype=np.int64)


def verdict(
    *,
    own: LongArray | None = None,
    after: LongArray | None = None,
    similarity: float = 0.9,
    by_text: bool = True,
) -> BatchVerdict:
    """Ten probes that find their target, item 100 new."""
    targets = np.arange(10)
    before = np.stack([targets, targets + 50], axis=1)
    return judge(
        ["new"],
        [100],
        [lists([100, 1], [2, 100]) if own is None else own],
        [similarity],
        before,
        before if after is None else after,
        targets,
        GateOptions(k=2, own_k=2),
        by_text=by_text,
    )


def test_a_good_item_passes_with_its_figures() -> None:
    found = verdict()
    assert found.passed
    assert found.items[0].figures["own_share"] == 1.0
    assert found.items[0].figures["own_best_rank"] == 1
    assert found.figures["relative_drop"] == 0.0


def test_a_text_that_does_not_lead_back_is_refused() -> None:
    found = verdict(own=lists([1, 2], [2, 3], [100, 3]))
    assert not found.passed
    assert "1 of 3 prompts" in found.items[0].reasons[0]


def test_harm_to_old_items_is_refused_with_the_figures() -> None:
    after = np.stack([np.arange(10), np.arange(10) + 50], axis=1)
    after[:3, 0] = 99
    found = verdict(after=after)
    assert not found.passed
    assert found.items[0].passed
    assert "10 hits before, 7 after" in found.reasons[0]
    assert found.figures["relative_drop"] == 0.3


def test_one_hit_less_is_noise() -> None:
    after = np.stack([np.arange(10), np.arange(10) + 50], axis=1)
    after[0, 0] = 99
    assert verdict(after=after).passed


def test_an_item_that_stands_in_everybodys_list_is_refused() -> None:
    after = np.stack([np.arange(10), np.full(10, 100)], axis=1)
    found = verdict(after=after)
    assert not found.passed
    assert "100.0% of the lists" in found.items[0].reasons[0]


def test_a_text_unlike_anything_known_is_refused() -> None:
    for by_text in (False, True):
        found = verdict(similarity=0.1, by_text=by_text)
        assert "unlike every known item's: similarity 0.10" in found.items[0].reasons[0]
