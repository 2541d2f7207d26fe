"""Text from outside: one line, NFC, bounded."""

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.text import clean_text

ANY_TEXT = st.text(alphabet=st.characters(codec=None, exclude_categories=()), max_size=60)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("", ""),
        (" \t\r\n ", ""),
        ("Toy Story", "Toy Story"),
        ("  two\t\twords\n", "two words"),
        ("a\x00b\x07c\x7fd\x9be", "a b c d e"),
        ("lone \ud800 surrogate", "lone surrogate"),
        ("left\u202eright\u2066x\ufeff", "left right x"),
        ("Ame\u0301lie", "Am\u00e9lie"),
        ("line\u2028break", "line break"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_worked_examples(raw: str, clean: str) -> None:
    assert clean_text(raw, 100) == clean


def test_cut_leaves_no_trailing_space_and_counts_after_composition() -> None:
    assert clean_text("abc def", 4) == "abc"
    assert clean_text("e\u0301" * 10, 3) == "\u00e9" * 3


def test_leading_white_space_does_not_use_up_the_length() -> None:
    assert clean_text("\n" * 100_000 + "title", 5) == "title"


def test_four_character_compositions_fill_the_length() -> None:
    assert clean_text("\u03b1\u0313\u0300\u0345" * 5, 5) == "\u1f82" * 5


@given(ANY_TEXT, st.integers(1, 30))
def test_result_is_bounded_normal_and_stable(raw: str, limit: int) -> None:
    clean = clean_text(raw, limit)
    assert len(clean) <= limit
    assert unicodedata.is_normalized("NFC", clean)
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in clean)
    assert clean == clean.strip()
    assert clean_text(clean, limit) == clean
    clean.encode()


def test_long_hostile_text_is_quick() -> None:
    marks = "a" + "\u0301\u0316" * 50_000
    start = time.process_time()
    assert len(clean_text(marks, 2000)) == 2000
    assert time.process_time() - start < 2.0


def test_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chars is 0"):
        clean_text("x", 0)
