from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gti_core.data import splits
from gti_core.data.dataset import Interaction
from gti_core.data.splits import EvalCase, chronological, leave_one_out
from gti_core.errors import DataError


def test_doctests() -> None:
    assert doctest.testmod(splits).failed == 0


def test_leave_one_out_by_hand() -> None:
    split = leave_one_out({"u": ("a", "b", "c"), "v": ("a", "b"), "w": ("d", "a", "d", "b")})

    assert split.kind == "leave-one-out"
    assert split.train == {"u": ("a",), "v": ("a", "b"), "w": ("d", "a")}
    assert split.valid == (EvalCase("u", ("a",), "b"), EvalCase("w", ("d", "a"), "d"))
    assert split.test == (EvalCase("u", ("a", "b"), "c"), EvalCase("w", ("d", "a", "d"), "b"))


def test_min_length_moves_short_users_to_train() -> None:
    split = leave_one_out({"u": ("a", "b", "c"), "w": ("d", "a", "d", "b")}, min_length=4)

    assert split.train["u"] == ("a", "b", "c")
    assert [case.user_id for case in split.test] == ["w"]


@pytest.mark.parametrize(
    ("histories", "min_length"), [({"u": ("a", "b", "c")}, 2), ({}, 3), ({"u": ("a",)}, 0)]
)
def test_leave_one_out_refuses(histories: dict[str, tuple[str, ...]], min_length: int) -> None:
    with pytest.raises(DataError):
        leave_one_out(histories, min_length)


@given(
    st.dictionaries(
        st.text("uvw", min_size=1), st.lists(st.sampled_from("abc"), max_size=8), min_size=1
    ),
    st.integers(3, 6),
)
def test_leave_one_out_loses_and_leaks_nothing(
    histories: dict[str, list[str]], min_length: int
) -> None:
    split = leave_one_out(histories, min_length)
    test = {case.user_id: case for case in split.test}
    valid = {case.user_id: case for case in split.valid}

    assert set(test) == set(valid) == {u for u, h in histories.items() if len(h) >= min_length}
    for user_id, history in histories.items():
        if user_id in test:
            assert (*test[user_id].history, test[user_id].target) == tuple(history)
            assert (*valid[user_id].history, valid[user_id].target) == tuple(history[:-1])
            assert split.train[user_id] == valid[user_id].history
        else:
            assert split.train[user_id] == tuple(history)


def test_chronological_by_hand() -> None:
    log = [
        Interaction(user, item, time)
        for time, (user, item) in enumerate(
            [
                ("u", "a"),
                ("v", "a"),
                ("u", "b"),
                ("v", "c"),
                ("u", "c"),
                ("u", "d"),  # valid from here, 5 of 10
                ("w", "a"),  # no history, so no case
                ("w", "b"),
                ("v", "d"),  # test from here, 8 of 10
                ("w", "c"),
            ]
        )
    ]

    split = chronological(log[::-1], valid_fraction=0.3, test_fraction=0.2)

    assert split.kind == "chronological"
    assert split.train == {"u": ("a", "b", "c"), "v": ("a", "c")}
    assert split.valid == (EvalCase("u", ("a", "b", "c"), "d"), EvalCase("w", ("a",), "b"))
    assert split.test == (EvalCase("v", ("a", "c"), "d"), EvalCase("w", ("a", "b"), "c"))


def test_chronological_keeps_equal_times_together() -> None:
    times = [0, 1, 2, 3, 3, 3, 3, 4, 5, 5]
    log = [Interaction("u", str(index), time) for index, time in enumerate(times)]

    # By count, valid would start at index 6 and test at index 9, each in the midst of equals.
    split = chronological(log, valid_fraction=0.3, test_fraction=0.1)

    assert split.train == {"u": ("0", "1", "2")}
    assert [case.target for case in split.valid] == ["3", "4", "5", "6", "7"]
    assert [case.target for case in split.test] == ["8", "9"]
    assert split.test[1].history == tuple("012345678")


@pytest.mark.parametrize(
    ("times", "valid", "test"),
    [
        ([1, 2, 3, 4], 0.0, 0.5),
        ([1, 2, 3, 4], 0.5, 1.0),
        ([1, 2, 3, 4], 0.5, 0.5),
        ([1, 1, 1, 1], 0.25, 0.25),
        ([None, None], 0.1, 0.1),
        ([], 0.1, 0.1),
    ],
)
def test_chronological_refuses(times: list[float | None], valid: float, test: float) -> None:
    with pytest.raises(DataError):
        chronological([Interaction("u", "a", time) for time in times], valid, test)
