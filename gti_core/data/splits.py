"""Splits: what a model may learn from, and the cases it is judged on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gti_core.data.dataset import Interaction, sort_by_time
from gti_core.errors import DataError
from gti_core.types import ItemId

LEAVE_ONE_OUT = "leave-one-out"
CHRONOLOGICAL = "chronological"


@dataclass(frozen=True)
class EvalCase:
    """One question to a model: after this history, does it name the target?

    Args:
        user_id: the user.
        history: item ids before the target, oldest first.
        target: the item that came next.
    """

    user_id: str
    history: tuple[ItemId, ...]
    target: ItemId


@dataclass(frozen=True)
class Split:
    """Training histories and evaluation cases.

    Args:
        kind: `LEAVE_ONE_OUT` or `CHRONOLOGICAL`.
        train: item ids by user, oldest first; all that training may see.
        valid: cases to choose settings by.
        test: cases to report.
    """

    kind: str
    train: dict[str, tuple[ItemId, ...]]
    valid: tuple[EvalCase, ...]
    test: tuple[EvalCase, ...]


def leave_one_out(histories: Mapping[str, Sequence[ItemId]], min_length: int = 3) -> Split:
    """Each user's last item is the test target, the one before it the validation target.

    The test case's history includes the validation item. A user with fewer than ``min_length``
    items goes wholly to train and has no case.

    Args:
        histories: item ids by user, oldest first.
        min_length: fewest items of a user that is evaluated, at least 3 (one is left to train).

    Raises:
        DataError: ``min_length`` is less than 3, or there is no history.

    >>> split = leave_one_out({"ann": ["a", "b", "c", "d"], "bob": ["a", "b"]})
    >>> split.train
    {'ann': ('a', 'b'), 'bob': ('a', 'b')}
    >>> split.test
    (EvalCase(user_id='ann', history=('a', 'b', 'c'), target='d'),)
    """
    if min_length < 3:
        raise DataError(f"min_length is {min_length}; leave-one-out needs at least 3 items")
    if not histories:
        raise DataError("there is no history to split")
    train: dict[str, tuple[ItemId, ...]] = {}
    valid: list[EvalCase] = []
    test: list[EvalCase] = []
    for user_id, items in histories.items():
        history = tuple(items)
        if len(history) < min_length:
            train[user_id] = history
            continue
        train[user_id] = history[:-2]
        valid.append(EvalCase(user_id, history[:-2], history[-2]))
        test.append(EvalCase(user_id, history[:-1], history[-1]))
    return Split(LEAVE_ONE_OUT, train, tuple(valid), tuple(test))


def chronological(
    interactions: Sequence[Interaction], valid_fraction: float = 0.1, test_fraction: float = 0.1
) -> Split:
    """Two cuts in global time: before both is train, then valid, then test.

    Every interaction behind a cut is one case; its history is all that its user did before,
    earlier cases included. Interactions of the same time as the cut fall behind it, so nothing in
    train is as late as any case. An interaction without a history makes no case.

    Args:
        interactions: the log in any order, all with timestamps.
        valid_fraction: share of the interactions between the cuts, in (0, 1).
        test_fraction: share of the interactions after the last cut, in (0, 1).

    Raises:
        DataError: a fraction out of range, a log without timestamps, or nothing left to train on.
    """
    for name, fraction in (("valid_fraction", valid_fraction), ("test_fraction", test_fraction)):
        if not 0 < fraction < 1:
            raise DataError(f"{name} is {fraction}; it must be above 0 and below 1")
    if valid_fraction + test_fraction >= 1:
        raise DataError(f"valid and test take {valid_fraction + test_fraction} of the log")
    ordered = sort_by_time(interactions)
    times = [x.timestamp for x in ordered if x.timestamp is not None]
    if not times:
        raise DataError("a chronological split needs timestamps")
    count = len(times)
    test_from = times[min(count - 1, round(count * (1 - test_fraction)))]
    valid_from = times[min(count - 1, round(count * (1 - test_fraction - valid_fraction)))]
    if valid_from == times[0]:
        raise DataError("nothing is left to train on: too few distinct timestamps")
    train: dict[str, list[ItemId]] = {}
    valid: list[EvalCase] = []
    test: list[EvalCase] = []
    seen: dict[str, list[ItemId]] = {}
    for time, interaction in zip(times, ordered, strict=True):
        history = seen.setdefault(interaction.user_id, [])
        if time < valid_from:
            train.setdefault(interaction.user_id, []).append(interaction.item_id)
        elif history:
            case = EvalCase(interaction.user_id, tuple(history), interaction.item_id)
            (valid if time < test_from else test).append(case)
        history.append(interaction.item_id)
    return Split(
        CHRONOLOGICAL,
        {user_id: tuple(items) for user_id, items in train.items()},
        tuple(valid),
        tuple(test),
    )
