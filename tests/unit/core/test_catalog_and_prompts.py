"""The catalogue's invariants, and the append-only prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.catalog import Item, ItemCatalog
from gti_core.errors import BundleError, CatalogError
from gti_core.prompts import AppendOnlyPrompt
from gti_core.vocabulary import SidVocabulary

ITEMS = [
    Item("a", (0, 1), "Alpha", popularity=2),
    Item("b", (0, 2), "Beta", popularity=5),
    Item("c", (1, 0), "Gamma", popularity=5),
]


def test_lookups():
    catalog = ItemCatalog(ITEMS)
    assert len(catalog) == 3
    assert catalog.row("c") == 2
    assert catalog.get("z") is None
    assert catalog.at_sid((0, 2)).item_id == "b"
    assert catalog.at_sid((9, 9)) is None
    assert catalog.sids.tolist() == [[0, 1], [0, 2], [1, 0]]


def test_digest_covers_ids_sids_and_order_but_not_text():
    digest = ItemCatalog(ITEMS).digest
    assert ItemCatalog(ITEMS).with_texts({"a": {"title": "Other"}}).digest == digest
    assert ItemCatalog(ITEMS[::-1]).digest != digest
    assert ItemCatalog([Item("a", (0, 2)), *ITEMS[2:]]).digest != digest


def test_texts_join_by_id():
    catalog = ItemCatalog(ITEMS).with_texts({"a": {"title": "New", "attributes": {"year": 1}}})
    assert catalog.get("a").title == "New"
    assert catalog.get("a").attributes == {"year": 1}
    assert catalog.get("a").popularity == 2
    assert catalog.get("b").title == "Beta"


@pytest.mark.parametrize(
    "items",
    [
        [],
        [Item("a", (0,)), Item("a", (1,))],
        [Item("a", (0,)), Item("b", (0,))],
        [Item("a", (0,)), Item("b", (0, 1))],
        [Item("a", ())],
    ],
)
def test_contradictions_are_refused(items):
    with pytest.raises(CatalogError):
        ItemCatalog(items)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 200))
def test_window_keeps_the_newest_and_moves_in_steps(max_history, drop, length):
    prompt = AppendOnlyPrompt("", (), max_history, min(drop, max_history))
    history = [(i,) for i in range(length)]
    window = list(prompt.window(history))
    assert window == history[length - len(window) :]
    assert len(window) <= max_history
    assert len(window) >= min(length, max_history - prompt.drop + 1)
    assert (length - len(window)) % prompt.drop == 0


def test_an_earlier_prompt_is_a_prefix_of_the_next_one():
    vocabulary = SidVocabulary((4, 4), (4, 4), 50)
    prompt = AppendOnlyPrompt("Hi", (7, 8), 10, 5)
    history = [(i % 4, i % 3) for i in range(10)]
    for length in range(10):
        shorter = prompt.token_ids(history[:length], vocabulary)
        longer = prompt.token_ids(history[: length + 1], vocabulary)
        assert longer[: len(shorter)] == shorter
    assert prompt.token_ids(history[:1], vocabulary) == [7, 8, 50, 54]
    assert prompt.max_tokens(2) == 24


def test_json_round_trip_and_unknown_template():
    prompt = AppendOnlyPrompt("Hi", (7, 8), 10, 5)
    assert AppendOnlyPrompt.from_json(prompt.to_json()) == prompt
    with pytest.raises(BundleError, match="chat/9"):
        AppendOnlyPrompt.from_json({**prompt.to_json(), "template": "chat/9"})
