"""Beam search against exhaustive scoring, on random catalogues and random scores."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.decoding import BeamSearch, ConstraintIndex, beam_search, exhaustive_search
from gti_core.errors import DecodingError
from gti_core.vocabulary import SidVocabulary

LEVEL_SIZE = 5

catalogues = st.integers(1, 4).flatmap(
    lambda levels: st.lists(
        st.tuples(*[st.integers(0, LEVEL_SIZE - 1)] * levels), min_size=1, max_size=60, unique=True
    )
)


def scorer(vocabulary: SidVocabulary, seed: int):
    """Log-softmax of seeded normal logits that depend on the prefix alone."""

    def score(prefixes):
        rows = []
        for prefix in prefixes:
            key = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
            logits = np.random.default_rng(list(key)).normal(size=vocabulary.rows) * 3
            logits[~vocabulary.active_mask] = -np.inf
            rows.append(logits - np.logaddexp.reduce(logits))
        return np.array(rows, dtype=np.float64)

    return score


def setting(sids, seed):
    levels = len(sids[0])
    vocabulary = SidVocabulary((LEVEL_SIZE + 2,) * levels, (LEVEL_SIZE,) * levels, 100)
    return ConstraintIndex(np.array(sids, dtype=np.int32)), vocabulary, scorer(vocabulary, seed)


@given(catalogues, st.integers(0, 2**31), st.data())
def test_a_beam_as_wide_as_the_catalogue_equals_exhaustive_scoring(sids, seed, data):
    excluded = data.draw(st.sets(st.sampled_from(sids)))
    index, vocabulary, score = setting(sids, seed)
    admissible = index.admissible([sids.index(sid) for sid in excluded])
    width = len(sids) + data.draw(st.integers(0, 3))
    found = beam_search(score, index, vocabulary, admissible, width, k=len(sids))
    expected = exhaustive_search(score, sids, vocabulary, len(sids), frozenset(excluded))
    assert [item.sid for item in found] == [sid for sid, _ in expected]
    assert [item.logprob for item in found] == pytest.approx([value for _, value in expected])
    assert [sids[item.row] for item in found] == [item.sid for item in found]


@given(catalogues, st.integers(0, 2**31), st.integers(1, 12), st.data())
def test_exactly_k_come_back_whenever_k_are_admissible(sids, seed, width, data):
    excluded = data.draw(st.sets(st.sampled_from(sids)))
    index, vocabulary, score = setting(sids, seed)
    admissible = index.admissible([sids.index(sid) for sid in excluded])
    found = beam_search(score, index, vocabulary, admissible, width, k=width)
    assert len(found) == min(width, len(sids) - len(excluded))
    assert {item.sid for item in found} <= set(sids) - excluded
    assert len({item.sid for item in found}) == len(found)
    assert [item.logprob for item in found] == sorted(
        (item.logprob for item in found), reverse=True
    )


def test_parents_follow_prefixes_with_unequal_numbers_of_children():
    # One prefix has four children, the others one: a parent index by equal shares would be wrong.
    sids = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (2, 0)]
    index, vocabulary, score = setting(sids, seed=7)
    search = BeamSearch(index, vocabulary, index.admissible(), 6)
    search.advance(score([()]))
    first = [beam.prefix for beam in search.frontier]
    search.advance(score(first))
    assert search.parents == [first.index(beam.prefix[:1]) for beam in search.frontier]
    assert {beam.prefix for beam in search.frontier} == set(sids)


def test_equal_scores_keep_the_order_of_the_sids():
    sids = [(2, 0), (0, 1), (1, 3), (0, 0)]
    index, vocabulary, _ = setting(sids, 0)
    flat = np.zeros((1, vocabulary.rows))
    found = beam_search(
        lambda prefixes: flat.repeat(len(prefixes), axis=0),
        index,
        vocabulary,
        index.admissible(),
        4,
        4,
    )
    assert [item.sid for item in found] == sorted(sids)


def test_reserved_codes_take_no_part_in_the_softmax():
    vocabulary = SidVocabulary((4,), (2,), 10)
    logprobs = scorer(vocabulary, 1)([()])
    assert np.exp(logprobs[0, :2]).sum() == pytest.approx(1.0)
    assert np.isneginf(logprobs[0, 2:]).all()


def test_nothing_admissible_is_done_at_once_and_empty():
    index, vocabulary, score = setting([(0, 1)], 0)
    assert beam_search(score, index, vocabulary, index.admissible([0]), 5, 5) == []


def test_wrong_shapes_nan_and_early_results_are_refused():
    index, vocabulary, _ = setting([(0, 1), (1, 1)], 0)
    search = BeamSearch(index, vocabulary, index.admissible(), 2)
    with pytest.raises(DecodingError, match="shape"):
        search.advance(np.zeros((2, vocabulary.rows), dtype=np.float32))
    with pytest.raises(DecodingError, match="level 0"):
        search.results(1)
    with pytest.raises(DecodingError, match="NaN"):
        search.advance(np.full((1, vocabulary.rows), np.nan, dtype=np.float32))
    with pytest.raises(DecodingError, match="beam_width"):
        BeamSearch(index, vocabulary, index.admissible(), 0)
