"""Texts of refusals: words of JSON, nothing of the validator."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType

from service.faults import _BUILT_IN, _WORDS, plain_words


def test_every_word_is_for_a_fault_that_the_validator_knows() -> None:
    assert set(_WORDS) <= _BUILT_IN
    assert ErrorType


@pytest.mark.parametrize(
    ("kind", "context", "words"),
    [
        ("too_short", {"min_length": 1}, "at least 1 entry"),
        ("too_long", {"max_length": 16}, "at most 16 entries"),
        ("string_too_short", {"min_length": 1}, "at least 1 character"),
        ("less_than_equal", {"le": 60.0}, "at most 60"),
        ("greater_than_equal", {"ge": 0.5}, "at least 0.5"),
        ("date_parsing", {"error": "x"}, "not a valid value"),
        ("item_twice", {}, "of our own"),
    ],
)
def test_words(kind: str, context: dict[str, Any], words: str) -> None:
    assert plain_words({"type": kind, "msg": "of our own", "ctx": context}) == words


def test_what_a_validation_error_says() -> None:
    class Body(BaseModel):
        k: int

    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"k": "x"}, strict=True)
    assert [plain_words(fault) for fault in caught.value.errors()] == ["must be an integer"]
