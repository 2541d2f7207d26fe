"""Deltas: a version is its base and a chain of changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.bundle.delta import CatalogState, Delta, Rows, digest
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding.constraint import ConstraintIndex
from gti_core.errors import BundleError, VocabularyError
from gti_core.vocabulary import SidVocabulary

VOCABULARY = SidVocabulary((4, 4, 12), (3, 3, 4), 100)


def base() -> CatalogState:
    sids = [(a, b, c) for a in range(3) for b in range(2) for c in range(2)]
    items = [Item(f"i{n}", sid, f"Title {n}", popularity=n) for n, sid in enumerate(sids)]
    return CatalogState.of(ItemCatalog(items), VOCABULARY)


def rows(*numbers: int, width: int = 3) -> Rows:
    values = np.random.default_rng(sum(numbers)).standard_normal((len(numbers), width))
    return Rows(np.array(numbers, dtype=np.int64), values.astype(np.float32))


def onboard(state: CatalogState, *item_ids: str) -> Delta:
    """A delta that gives each item a code of its own at the last level."""
    first = state.vocabulary.active[-1]
    vocabulary = state.vocabulary.activate(2, len(item_ids))
    items = [Item(name, (0, 1, first + n), name.title()) for n, name in enumerate(item_ids)]
    numbers = [vocabulary.row(2, first + n) for n in range(len(item_ids))]
    return Delta(vocabulary, tuple(items), rows=rows(*numbers))


def test_a_delta_adds_items_with_their_rows() -> None:
    state = base()
    delta = onboard(state, "new", "newer")
    after = state.apply(delta)
    assert len(after.catalog) == 14
    assert len(state.catalog) == 12
    assert after.catalog.row("newer") == 13
    assert after.index.available.all()
    assert after.vocabulary.active == (3, 3, 6)


def test_a_delta_reads_back_as_it_was_written() -> None:
    state = base()
    delta = onboard(state, "n\u0000ew", "é\u2028")
    document, block = delta.document(), delta.block()
    again = Delta.parse(document, block)
    assert again.document() == document
    assert again.rows is not None
    assert delta.rows is not None
    np.testing.assert_array_equal(again.rows.rows_in, delta.rows.rows_in)
    assert digest(document, block) == digest(again.document(), again.block())
    assert digest(document, block) != digest(document, None)


@pytest.mark.parametrize(
    ("document", "block"),
    [("", None), ("{}", None), ('{"format": "gti-delta/9"}', None), ("[1]", None)],
)
def test_what_is_no_delta_is_refused(document: str, block: bytes | None) -> None:
    with pytest.raises(BundleError):
        Delta.parse(document, block)


def test_a_damaged_block_is_refused() -> None:
    delta = onboard(base(), "new")
    block = delta.block()
    assert block is not None
    with pytest.raises(BundleError):
        Delta.parse(delta.document(), block[:-5])


def test_an_item_with_a_known_id_supersedes_its_row() -> None:
    state = base()
    after = state.apply(onboard(state, "i3"))
    assert after.catalog.row("i3") == 12
    assert after.catalog.superseded == {3}
    assert not after.index.available[3]
    assert after.index.available[12]
    assert after.catalog.items[3].item_id == "i3"
    assert after.catalog.at_sid(state.catalog.items[3].sid) is not None


def test_retiring_and_restoring() -> None:
    state = base()
    retired = state.apply(Delta(VOCABULARY, retired=("i0", "i5")))
    assert list(np.flatnonzero(~retired.index.available)) == [0, 5]
    restored = retired.apply(Delta(VOCABULARY, restored=("i5",), attributes={"i1": {"year": 7}}))
    assert list(np.flatnonzero(~restored.index.available)) == [0]
    assert restored.catalog.items[1].attributes == {"year": 7}
    assert state.catalog.items[1].attributes == {}


@pytest.mark.parametrize(
    "delta",
    [
        Delta(VOCABULARY, retired=("unknown",)),
        Delta(VOCABULARY, (Item("x", (0, 0, 0)),)),
        Delta(VOCABULARY, (Item("x", (0, 0, 4)),)),
        Delta(VOCABULARY.activate(2), (Item("x", (0, 0, 4)),)),
        Delta(VOCABULARY.activate(2), (Item("x", (0, 0, 4)),), rows=rows(3)),
        Delta(SidVocabulary((4, 4, 12), (2, 3, 4), 100)),
        Delta(SidVocabulary((4, 4, 13), (3, 3, 4), 100)),
    ],
)
def test_a_delta_that_does_not_fit_is_refused(delta: Delta) -> None:
    with pytest.raises(BundleError):
        base().apply(delta)


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("numbers", "rows_in", "rows_out", "complaint"),
    [
        ([0], ONES, None, "1 numbers for 2 rows"),
        ([0, 1], ONES[0], None, "shape"),
        ([0, 1], ONES, ONES[:, :2], "shape"),
        ([0, 0], ONES, None, "ascend"),
        ([2, 1], ONES, None, "ascend"),
        ([-1, 0], ONES, None, "ascend from 0"),
        ([0, 1], ONES * np.float32(np.nan), None, "not finite"),
        ([0, 1], ONES, np.full((2, 3), np.inf, np.float32), "not finite"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(
    numbers: list[int],
    rows_in: np.ndarray,
    rows_out: np.ndarray | None,
    complaint: str,
) -> None:
    with pytest.raises(BundleError, match=complaint):
        Rows(np.array(numbers, dtype=np.int64), rows_in, rows_out)


def test_rows_are_joined_by_number_and_chosen_by_a_mask() -> None:
    first = Rows(np.array([1, 4]), ONES, 2 * ONES)
    second = Rows(np.array([3]), 3 * ONES[:1], 4 * ONES[:1])
    both = first.joined(second)
    assert both.numbers.tolist() == [1, 3, 4]
    assert both.rows_in[:, 0].tolist() == [1, 3, 1]
    assert both.output[:, 0].tolist() == [2, 4, 2]
    assert first.joined(None) is first
    chosen = both.chosen(both.numbers > 1)
    assert chosen.numbers.tolist() == [3, 4]
    assert chosen.output[:, 0].tolist() == [4, 2]
    with pytest.raises(BundleError, match="tied"):
        first.joined(Rows(np.array([3]), ONES[:1]))
    with pytest.raises(BundleError, match="ascend"):
        first.joined(first)


def test_a_branch_skips_the_codes_of_the_other_branch() -> None:
    state = base()
    other = state.apply(onboard(state, "a", "b"))
    vocabulary = state.vocabulary.skip_to(2, other.vocabulary.active[2]).activate(2)
    assert not vocabulary.is_active((0, 0, 4))
    assert not vocabulary.is_active((0, 0, 5))
    assert vocabulary.is_active((0, 0, 6))
    assert not vocabulary.active_mask[vocabulary.row(2, 5)]
    assert SidVocabulary.from_json(vocabulary.to_json()) == vocabulary
    item = Item("c", (0, 0, 6))
    after = state.apply(Delta(vocabulary, (item,), rows=rows(vocabulary.row(2, 6))))
    assert after.catalog.get("c") is not None
    with pytest.raises(VocabularyError):
        vocabulary.skip_to(2, 3)


@given(st.lists(st.sampled_from(["add", "retire", "restore", "replace"]), max_size=12), st.data())
def test_a_chain_of_deltas_equals_a_catalogue_built_at_once(
    kinds: list[str], data: st.DataObject
) -> None:
    state, deltas = base(), []
    available = {item.item_id: True for item in state.catalog}
    for number, kind in enumerate(kinds):
        known = sorted(available)
        if kind in ("add", "replace") and state.vocabulary.reserved(2):
            name = f"n{number}" if kind == "add" else data.draw(st.sampled_from(known))
            delta = onboard(state, name)
            available[name] = True
        else:
            name = data.draw(st.sampled_from(known))
            available[name] = kind == "restore"
            delta = Delta(
                state.vocabulary,
                retired=() if available[name] else (name,),
                restored=(name,) if available[name] else (),
            )
        deltas.append(Delta.parse(delta.document(), delta.block()))
        state = state.apply(delta)
    replayed = base()
    for delta in deltas:
        replayed = replayed.apply(delta)
    assert replayed.catalog.items == state.catalog.items
    activated = replayed.vocabulary.active_mask & ~VOCABULARY.active_mask
    numbers = [] if replayed.rows is None else list(replayed.rows.numbers)
    assert numbers == list(np.flatnonzero(activated))
    bits = np.array(
        [
            row not in state.catalog.superseded and available[item.item_id]
            for row, item in enumerate(state.catalog)
        ]
    )
    whole = ConstraintIndex(state.catalog.sids, bits)
    np.testing.assert_array_equal(replayed.index.sids, whole.sids)
    np.testing.assert_array_equal(replayed.index.available, bits)
