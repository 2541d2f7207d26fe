"""Item texts, interactions, and the dataset they make: what every later stage starts from."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gti_core.errors import DataError
from gti_core.types import ItemId, JsonDict

if TYPE_CHECKING:
    from gti_core.catalog import Item

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ItemText:
    """What is known of an item before it has a semantic ID.

    Args:
        item_id: external id, never empty.
        title: text shown to people.
        description: longer text, may be empty.
        attributes: further fields (year, genres, brand), JSON values only.

    Raises:
        DataError: the id is not a string or is empty.
    """

    item_id: ItemId
    title: str
    description: str = ""
    attributes: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_id(self.item_id, "item")


def text_record(item: ItemText | Item) -> JsonDict:
    """An item's id, title, description and attributes, as they stand in JSON."""
    return {
        "item_id": item.item_id,
        "title": item.title,
        "description": item.description,
        "attributes": dict(item.attributes),
    }


@dataclass(frozen=True)
class Interaction:
    """One user met one item.

    Args:
        user_id: external id, never empty.
        item_id: external id, never empty.
        timestamp: any number that grows with time (seconds by custom), or None when the source
            has no times and its order is the order of events.

    Raises:
        DataError: an id is not a string or is empty, or the timestamp is not finite.
    """

    user_id: str
    item_id: ItemId
    timestamp: float | None

    def __post_init__(self) -> None:
        _check_id(self.user_id, "user")
        _check_id(self.item_id, "item")
        if self.timestamp is not None and not math.isfinite(self.timestamp):
            raise DataError(f"user {self.user_id!r}: timestamp {self.timestamp} is not finite")


@dataclass(frozen=True)
class Dataset:
    """Items and the users' histories over them.

    Args:
        name: for people.
        items: the items, distinct ids; their order is the row order of every array over items.
        histories: item ids by user, oldest first. An item may occur more than once.
        dropped: interactions left out because their item has no text (see `from_interactions`).

    Raises:
        DataError: no item, an item id twice, or a history with an id that no item has.
    """

    name: str
    items: tuple[ItemText, ...]
    histories: dict[str, tuple[ItemId, ...]]
    dropped: int = 0

    def __post_init__(self) -> None:
        known = _distinct_ids(self.items)
        for user_id, history in self.histories.items():
            _check_id(user_id, "user")
            for item_id in history:
                if item_id not in known:
                    raise DataError(f"user {user_id!r}: item {item_id!r} has no text")

    @property
    def interactions(self) -> int:
        """Number of interactions over all histories."""
        return sum(len(history) for history in self.histories.values())

    @classmethod
    def from_interactions(
        cls,
        name: str,
        items: Sequence[ItemText],
        interactions: Iterable[Interaction],
        *,
        drop_unknown: bool = False,
    ) -> Dataset:
        """A dataset from a log.

        Histories are in order of time; interactions of equal time keep the order of the log.

        Args:
            name: for people.
            items: the items that have text.
            interactions: the log, in any order.
            drop_unknown: what to do with an interaction whose item has no text. False (the
                default) refuses the log: a join that misses items is nearly always a fault in the
                files. True leaves such interactions out, counts them in ``dropped`` and logs the
                count.

        Raises:
            DataError: see above; also when only part of the log has timestamps, and when nothing
                is left of the log.
        """
        known = _distinct_ids(items)
        kept: list[Interaction] = []
        missing: dict[ItemId, int] = {}
        for interaction in interactions:
            if interaction.item_id in known:
                kept.append(interaction)
            else:
                missing[interaction.item_id] = missing.get(interaction.item_id, 0) + 1
        dropped = sum(missing.values())
        if missing and not drop_unknown:
            examples = ", ".join(repr(item_id) for item_id in list(missing)[:3])
            raise DataError(
                f"{dropped} interactions name {len(missing)} items that have no text "
                f"(for instance {examples}); add the items or ask to drop such interactions"
            )
        if not kept:
            raise DataError(f"{name}: no interaction is left")
        if dropped:
            logger.warning(
                "%s: left out %d interactions with %d items that have no text",
                name,
                dropped,
                len(missing),
            )
        histories: dict[str, list[ItemId]] = {}
        for interaction in sort_by_time(kept):
            histories.setdefault(interaction.user_id, []).append(interaction.item_id)
        return cls(
            name,
            tuple(items),
            {user_id: tuple(history) for user_id, history in histories.items()},
            dropped,
        )


def sort_by_time(interactions: Sequence[Interaction]) -> list[Interaction]:
    """Interactions, oldest first; equal times keep their order, no times at all keep all of it.

    Raises:
        DataError: some interactions have a timestamp and others have none.
    """
    stamped = [
        (interaction.timestamp, interaction)
        for interaction in interactions
        if interaction.timestamp is not None
    ]
    if not stamped:
        return list(interactions)
    if len(stamped) != len(interactions):
        raise DataError(
            f"{len(interactions) - len(stamped)} of {len(interactions)} interactions have no "
            "timestamp; either all or none must have one"
        )
    return [interaction for _, interaction in sorted(stamped, key=lambda pair: pair[0])]


def _check_id(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise DataError(f"{what} id {value!r} is not a string")
    if not value:
        raise DataError(f"{what} id is empty")


def _distinct_ids(items: Sequence[ItemText]) -> set[ItemId]:
    if not items:
        raise DataError("a dataset needs at least one item")
    known: set[ItemId] = set()
    for item in items:
        if item.item_id in known:
            raise DataError(f"item id {item.item_id!r} appears twice")
        known.add(item.item_id)
    return known
