"""What every engine takes: versions, rows, changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gti_core.vocabulary import SidVocabulary
from service.engine.base import EngineError, RowUpdate, ServingModel, check_same_weights

ONES = np.ones((2, 3), np.float32)


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
    ("numbers", "rows_in", "rows_out", "complaint"),
    [
        ([0], ONES, None, "1 row numbers"),
        ([0, 1], ONES[0], None, "2 row numbers"),
        ([0, 1], ONES, ONES[:, :2], "shape"),
        ([0, 0], ONES, None, "distinct"),
        ([0, -1], ONES, None, "0 or more"),
        ([0, 1], ONES * np.float32(np.nan), None, "not finite"),
        ([0, 1], ONES, np.full((2, 3), np.inf, np.float32), "not finite"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(numbers, rows_in, rows_out, complaint):
    with pytest.raises(ValueError, match=complaint):
        RowUpdate(np.array(numbers), rows_in, rows_out)


def test_updates_are_joined_in_order() -> None:
    first = RowUpdate(np.array([4, 1]), ONES, 2 * ONES)
    second = RowUpdate(np.array([3]), 3 * ONES[:1], 4 * ONES[:1])
    both = RowUpdate.joined([first, second])
    assert both.numbers.tolist() == [4, 1, 3]
    assert both.rows_in[:, 0].tolist() == [1, 1, 3]
    assert both.rows_out is not None
    assert both.rows_out[:, 0].tolist() == [2, 2, 4]
    with pytest.raises(ValueError, match="others without"):
        RowUpdate.joined([first, RowUpdate(np.array([3]), ONES[:1])])
    with pytest.raises(ValueError, match="distinct"):
        RowUpdate.joined([first, first])


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
