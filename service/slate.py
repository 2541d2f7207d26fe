"""From a ranking to the list that is shown: diversity caps, explanations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gti_core.catalog import Item
from gti_core.types import Sid
from service.attribute_filter import value_of, values_of

_T = TypeVar("_T")


@dataclass(frozen=True)
class Cap:
    """At most ``most`` items with one value of ``attribute``."""

    attribute: str
    most: int


@dataclass(frozen=True)
class Nearest:
    """The item of a history that shares most first codes with another.

    Args:
        item: it, or None: no item of the history shares the first code.
        shared_levels: first codes that both have in common.
    """

    item: Item | None
    shared_levels: int


def capped(ranked: Iterable[tuple[Item, _T]], cap: Cap) -> Iterator[tuple[Item, _T]]:
    """The items that a cap lets through, in their order; greedy, so the best come first."""
    taken: Counter[tuple[str, object]] = Counter()
    for item, rest in ranked:
        values = {value_of(value) for value in values_of(item.attributes, cap.attribute)}
        if any(taken[value] >= cap.most for value in values):
            continue
        taken.update(values)
        yield item, rest


def nearest(sid: Sid, history: Sequence[Item]) -> Nearest:
    """The latest item of a history among those that share most first codes with a SID."""
    best: Item | None = None
    most = 0
    for item in reversed(history):
        shared = 0
        for mine, theirs in zip(sid, item.sid, strict=True):
            if mine != theirs:
                break
            shared += 1
        if shared > most:
            best, most = item, shared
    return Nearest(best, most)
