"""(level, code) <-> token text <-> token id, active and reserved codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.errors import VocabularyError
from gti_core.vocabulary import SidVocabulary

vocabularies = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=5)


@given(vocabularies, st.integers(0, 60_000))
def test_ids_texts_and_codes_round_trip(levels, first):
    sizes = tuple(active + reserve for active, reserve in levels)
    vocabulary = SidVocabulary(sizes, tuple(active for active, _ in levels), first)
    texts = vocabulary.token_texts()
    assert len(texts) == len(set(texts)) == vocabulary.rows == sum(sizes)
    row = 0
    for level, size in enumerate(sizes):
        for code in range(size):
            assert vocabulary.row(level, code) == row
            assert vocabulary.code(vocabulary.token_id(level, code)) == (level, code)
            assert vocabulary.parse_token_text(texts[row]) == (level, code)
            assert vocabulary.active_mask[row] == (code < levels[level][0])
            row += 1
    assert SidVocabulary.from_json(vocabulary.to_json()) == vocabulary


def test_worked_example():
    vocabulary = SidVocabulary((3, 5), (3, 4), 100)
    assert vocabulary.token_ids((2, 0)) == [102, 103]
    assert vocabulary.token_ids((1,)) == [101]
    assert vocabulary.code(107) == (1, 4)
    assert vocabulary.activate(1).active == (3, 5)


@pytest.mark.parametrize("token_id", [-1, 99, 108, 10**9])
def test_other_tokens_are_no_codes(token_id):
    with pytest.raises(VocabularyError):
        SidVocabulary((3, 5), (3, 4), 100).code(token_id)


@pytest.mark.parametrize("text", ["", "<|sid_0_3|>", "<|sid_2_0|>", "<|sid_0_0|> ", "<|im_start|>"])
def test_other_texts_are_no_codes(text):
    with pytest.raises(VocabularyError):
        SidVocabulary((3, 5), (3, 4), 100).parse_token_text(text)


def test_reserve_used_up_is_an_error():
    with pytest.raises(VocabularyError, match="1 reserved codes left, 2 asked"):
        SidVocabulary((3, 5), (3, 4), 100).activate(1, 2)


@pytest.mark.parametrize(
    ("sizes", "active", "first"),
    [((), (), 0), ((3,), (4,), 0), ((3,), (0,), 0), ((3, 3), (3,), 0), ((3,), (3,), -1)],
)
def test_contradictions_are_refused(sizes, active, first):
    with pytest.raises(VocabularyError):
        SidVocabulary(sizes, active, first)


def test_json_without_a_field_is_refused():
    with pytest.raises(VocabularyError, match="active"):
        SidVocabulary.from_json({"sizes": [3], "first_token_id": 1})
