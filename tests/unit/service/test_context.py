"""ServingContext refuses parts that don't fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gti_core.catalog import Item, ItemCatalog
from gti_core.errors import BundleError
from gti_core.prompts import AppendOnlyPrompt, SearchPrompt
from gti_core.vocabulary import SidVocabulary
from service.context import ServingContext

PROMPT = AppendOnlyPrompt("", (1,), max_history=4, drop=2)


def test_model_has_room_for_prompt_and_item(tiny_context: ServingContext) -> None:
    model = tiny_context.model(Path("folder"))
    # Three instruction tokens, four items of the history and the next one, three levels.
    assert model.max_tokens == 3 + 5 * 3
    assert model.model_dir == Path("folder")
    assert len(model.index) == 12


def test_model_has_room_for_a_search_prompt(tiny_context: ServingContext) -> None:
    search = SearchPrompt("for", "item", (1, 2), (3,), max_query_tokens=64)
    context = replace(tiny_context, search=search)
    assert context.model(Path("folder")).max_tokens == 2 + 64 + 1 + 3


def test_wrong_depth() -> None:
    catalog = ItemCatalog([Item("a", (0, 0))])
    with pytest.raises(BundleError, match="2 codes"):
        ServingContext.build("b", "d", catalog, SidVocabulary((2,), (2,), 0), PROMPT)


def test_inactive_code() -> None:
    catalog = ItemCatalog([Item("a", (0, 2))])
    with pytest.raises(BundleError, match="code 2 at level 1, of which 2 are active"):
        ServingContext.build("b", "d", catalog, SidVocabulary((3, 3), (2, 2), 0), PROMPT)
