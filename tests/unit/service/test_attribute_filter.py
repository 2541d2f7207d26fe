"""Attribute filters and caps against the plain reading of them."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gti_core.catalog import Item, ItemCatalog
from service.attribute_filter import (
    AttributeFilters,
    Condition,
    meets_oracle,
    selection_key,
    value_of,
    values_of,
)
from service.slate import Cap, capped, nearest

LARGE = [2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2.0**53, 2.0**60, 2**60 + 1, 10**400]
scalars = st.sampled_from(["a", "b", "", "1", 1, 1.0, 2, -3.5, True, False, None, *LARGE])
names = st.sampled_from(["genre", "year"])
attributes = st.dictionaries(names, scalars | st.lists(scalars, max_size=4), max_size=2)
listed = st.none() | st.lists(scalars, min_size=1, max_size=3).map(tuple)
bounds = st.none() | st.sampled_from([-4.0, 0.0, 1.0, 2, -(10**400), *LARGE])
conditions = st.lists(st.builds(Condition, names, listed, listed, bounds, bounds), max_size=3)


def catalogue(every: list[dict[str, object]]) -> ItemCatalog:
    return ItemCatalog(
        [Item(f"i{n}", (n // 5, n % 5), f"T{n}", attributes=a) for n, a in enumerate(every)]
    )


@given(st.lists(attributes, min_size=1, max_size=20), conditions)
def test_a_mask_is_what_each_item_says(every, asked):
    mask = AttributeFilters().selection(catalogue(every), asked).mask
    assert mask.tolist() == [all(meets_oracle(a, one) for one in asked) for a in every]


@given(st.lists(attributes, min_size=1, max_size=8), st.lists(conditions, min_size=1, max_size=6))
def test_what_is_kept_does_not_leak_between_filters_and_catalogues(every, asked):
    filters = AttributeFilters()
    catalogues = [catalogue(every), catalogue(every[::-1]), catalogue([*every, {}])]
    for conditions_ in [*asked, *asked]:
        for one in catalogues:
            mask = filters.selection(one, conditions_).mask
            assert mask.tolist() == [
                all(meets_oracle(item.attributes, c) for c in conditions_) for item in one
            ]


@given(conditions, st.randoms())
def test_keys_do_not_depend_on_order(asked, rng):
    shuffled = [
        Condition(
            one.attribute,
            None if one.any_of is None else tuple(reversed(one.any_of)),
            one.none_of,
            one.at_least,
            one.at_most,
        )
        for one in asked
    ]
    rng.shuffle(shuffled)
    assert selection_key(shuffled) == selection_key(asked)


def test_a_filter_seen_before_is_not_worked_out_again():
    filters = AttributeFilters()
    catalog = catalogue([{"genre": "a"}, {"genre": "b"}])
    first = filters.selection(catalog, [Condition("genre", ("a",))])
    assert filters.selection(catalog, [Condition("genre", ("a",))]).mask is first.mask
    assert first.mask.tolist() == [True, False]


@given(st.lists(attributes, max_size=25), st.integers(1, 3))
def test_a_cap_holds_and_takes_nothing_it_need_not(every, most):
    ranked = [(Item(f"i{n}", (n,), "", attributes=a), n) for n, a in enumerate(every)]
    kept = list(capped(ranked, Cap("genre", most)))
    assert [place for _, place in kept] == sorted(place for _, place in kept)
    counts: Counter[object] = Counter()
    passed = {item.item_id for item, _ in kept}
    for item, _ in ranked:
        values = {value_of(value) for value in values_of(item.attributes, "genre")}
        full = any(counts[value] >= most for value in values)
        assert (item.item_id in passed) == (not full)
        if not full:
            counts.update(values)


def test_the_nearest_item_shares_most_first_codes_and_is_the_latest():
    history = [
        Item(name, sid) for name, sid in (("a", (1, 2, 3)), ("b", (1, 2, 4)), ("c", (1, 9, 5)))
    ]
    assert nearest((1, 2, 5), history).item is history[1]
    assert nearest((1, 2, 5), history).shared_levels == 2
    assert nearest((1, 2, 3), history).shared_levels == 3
    assert nearest((2, 2, 3), history).item is None
    assert nearest((2, 2, 3), []).shared_levels == 0


def test_integers_beyond_float64_are_told_apart():
    catalog = catalogue([{"n": 2**53}, {"n": 2**53 + 1}, {"n": 2.0**53}, {"n": [10**400]}])
    filters = AttributeFilters()

    def found(*conditions: Condition) -> list[bool]:
        return filters.selection(catalog, conditions).mask.tolist()

    assert found(Condition("n", at_least=2**53 + 1)) == [False, True, False, True]
    assert found(Condition("n", at_most=2**53)) == [True, False, True, False]
    assert found(Condition("n", (2**53 + 1,))) == [False, True, False, False]
    assert found(Condition("n", (2.0**53,))) == [True, False, True, False]
    assert found(Condition("n", at_least=10**400, at_most=10**400)) == [False] * 3 + [True]
