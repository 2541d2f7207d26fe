from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.data.dataset import Dataset, Interaction, ItemText, sort_by_time
from gti_core.errors import DataError

ITEMS = (ItemText("a", "A"), ItemText("b", "B"), ItemText("c", "C"))


def test_histories_follow_time_and_equal_times_follow_the_file() -> None:
    log = [
        Interaction("u", "c", 3.0),
        Interaction("u", "b", 1.0),
        Interaction("v", "a", 2.0),
        Interaction("u", "a", 1.0),
    ]

    dataset = Dataset.from_interactions("toy", ITEMS, log)

    assert dataset.histories == {"u": ("b", "a", "c"), "v": ("a",)}
    assert dataset.interactions == 4
    assert dataset.dropped == 0


def test_without_timestamps_the_file_order_is_the_history() -> None:
    log = [Interaction("u", "c", None), Interaction("u", "a", None), Interaction("u", "c", None)]

    assert Dataset.from_interactions("toy", ITEMS, log).histories == {"u": ("c", "a", "c")}


def test_unknown_items_are_refused_with_their_number() -> None:
    log = [Interaction("u", "a", 1), Interaction("u", "x", 2), Interaction("v", "x", 3)]

    with pytest.raises(DataError, match=r"2 interactions name 1 items .*'x'"):
        Dataset.from_interactions("toy", ITEMS, log)


def test_unknown_items_are_dropped_and_counted_on_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = [Interaction("u", "a", 1), Interaction("u", "x", 2), Interaction("v", "y", 3)]

    dataset = Dataset.from_interactions("toy", ITEMS, log, drop_unknown=True)

    assert dataset.histories == {"u": ("a",)}
    assert dataset.dropped == 2
    assert "left out 2 interactions with 2 items" in caplog.text


def test_a_log_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(DataError, match="no interaction is left"):
        Dataset.from_interactions("toy", ITEMS, [Interaction("u", "x", 1)], drop_unknown=True)


def test_partly_timestamped_log_is_refused() -> None:
    with pytest.raises(DataError, match="1 of 2 interactions have no timestamp"):
        sort_by_time([Interaction("u", "a", None), Interaction("u", "b", 2.0)])


@pytest.mark.parametrize(
    "build",
    [
        lambda: ItemText("", "title"),
        lambda: ItemText(7, "title"),  # type: ignore[arg-type]
        lambda: Interaction("", "a", 1.0),
        lambda: Interaction("u", "", 1.0),
        lambda: Interaction("u", "a", math.nan),
        lambda: Interaction("u", "a", math.inf),
        lambda: Dataset("toy", (), {}),
        lambda: Dataset("toy", (*ITEMS, ItemText("a", "again")), {}),
        lambda: Dataset("toy", ITEMS, {"u": ("a", "x")}),
        lambda: Dataset("toy", ITEMS, {"": ("a",)}),
    ],
)
def test_invalid_values_are_refused(build: object) -> None:
    with pytest.raises(DataError):
        build()  # type: ignore[operator]


@given(st.lists(st.tuples(st.sampled_from("uvw"), st.sampled_from("abc"), st.integers(0, 5))))
def test_sorting_is_stable_and_loses_nothing(rows: list[tuple[str, str, int]]) -> None:
    log = [Interaction(user, item, time) for user, item, time in rows]

    assert sort_by_time(log) == [log[i] for _, i in sorted((r[2], i) for i, r in enumerate(rows))]
