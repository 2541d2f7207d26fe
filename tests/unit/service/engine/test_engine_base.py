"""What every engine takes: versions, rows, changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gti_core.vocabulary import SidVocabulary
from service.engine.base import EngineError, ServingModel, check_same_weights


def test_popular_items_are_those_in_service(tiny_model: ServingModel) -> None:
    # Most popular first: a3, 50, c1, c2 (equal: row order), f1.
    assert [item.item_id for item in tiny_model.popular[:4]] == ["a3", "50", "c1", "c2"]
    assert len(tiny_model.popular) == 12
    gone = replace(tiny_model, index=tiny_model.index.with_availability([2, 5], False))
    assert [item.item_id for item in gone.popular[:3]] == ["50", "c2", "f1"]
    assert len(gone.popular) == 10


def test_active_token_ids_are_those_of_the_version(tiny_model: ServingModel) -> None:
    # Levels begin at 16, 21 and 25; 4 of 5, 3 of 4 and 4 of 6 codes are active.
    assert tiny_model.active_token_ids == [16, 17, 18, 19, 21, 22, 23, 25, 26, 27, 28]
    more = replace(tiny_model, vocabulary=tiny_model.vocabulary.activate(1))
    assert set(more.active_token_ids) - set(tiny_model.active_token_ids) == {24}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"vocabulary": SidVocabulary((5, 4, 7), (4, 3, 4), 16)}, "SID rows"),
        ({"vocabulary": SidVocabulary((5, 4, 6), (4, 3, 4), 17)}, "first SID token 17"),
        ({"max_tokens": 99}, "longest prompt"),
    ],
)
def test_a_version_of_other_weights_is_refused(
    tiny_model: ServingModel, changed: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(EngineError, match=complaint):
        check_same_weights(tiny_model, replace(tiny_model, **changed))


def test_a_version_with_more_active_codes_is_accepted(tiny_model: ServingModel) -> None:
    more = replace(tiny_model, vocabulary=tiny_model.vocabulary.activate(0), version=2)
    check_same_weights(tiny_model, more)
