"""ItemCatalog: item id <-> semantic ID <-> text and attributes. Immutable and validated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gti_core.errors import CatalogError
from gti_core.types import IntArray, ItemId, JsonDict, Sid


@dataclass(frozen=True)
class Item:
    """One item.

    Args:
        item_id: external id.
        sid: semantic ID.
        title: text shown to people; may be empty when a bundle's text was not joined.
        description: longer text, may be empty.
        attributes: further fields (year, genres, brand), JSON values only.
        popularity: interactions in the training split; orders the fallback list.
    """

    item_id: ItemId
    sid: Sid
    title: str = ""
    description: str = ""
    attributes: Mapping[str, object] = field(default_factory=dict)
    popularity: int = 0


class ItemCatalog:
    """N items with one distinct SID each, in a fixed row order.

    Rows are never removed. An item that got a new SID has a new row; its old one is *superseded*:
    it keeps its SID, which old histories may be written in, and is not found by its id any more.

    Args:
        items: the items; their order is the catalogue's row order.

    Raises:
        CatalogError: duplicate id, duplicate SID, SIDs of different depth, or no item at all.
    """

    superseded: frozenset[int] = frozenset()
    """Rows whose item has a newer row."""

    def __init__(self, items: Sequence[Item]) -> None:
        if not items:
            raise CatalogError("a catalogue needs at least one item")
        self._items = tuple(items)
        self._row: dict[ItemId, int] = {}
        self._by_sid: dict[Sid, int] = {}
        depth = len(items[0].sid)
        for row, item in enumerate(self._items):
            if len(item.sid) != depth or depth == 0:
                raise CatalogError(f"item {item.item_id!r}: SID {item.sid} is not {depth} levels")
            if item.item_id in self._row:
                raise CatalogError(f"item id {item.item_id!r} appears twice")
            other = self._by_sid.get(item.sid)
            if other is not None:
                first = self._items[other].item_id
                raise CatalogError(f"items {first!r} and {item.item_id!r} share SID {item.sid}")
            self._row[item.item_id] = row
            self._by_sid[item.sid] = row

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._row

    @property
    def items(self) -> tuple[Item, ...]:
        """All items in row order."""
        return self._items

    @property
    def levels(self) -> int:
        """L, codes per SID."""
        return len(self._items[0].sid)

    @cached_property
    def sids(self) -> IntArray:
        """SIDs in row order, shape [N, L], int32, read-only."""
        sids = np.array([item.sid for item in self._items], dtype=np.int32)
        sids.flags.writeable = False
        return sids

    def get(self, item_id: ItemId) -> Item | None:
        """The item with this id, or None."""
        row = self._row.get(item_id)
        return None if row is None else self._items[row]

    def row(self, item_id: ItemId) -> int:
        """Row of an item id. Raises KeyError."""
        return self._row[item_id]

    def at_sid(self, sid: Sid) -> Item | None:
        """The item with this semantic ID, or None."""
        row = self._by_sid.get(sid)
        return None if row is None else self._items[row]

    @cached_property
    def digest(self) -> str:
        """sha256 over ids and SIDs in row order, hex. Text is not part of it."""
        payload = json.dumps([[item.item_id, list(item.sid)] for item in self._items])
        return hashlib.sha256(payload.encode()).hexdigest()

    def extended(self, items: Sequence[Item]) -> ItemCatalog:
        """A catalogue with further rows; an item whose id is known supersedes its row. O(N).

        Raises:
            CatalogError: a SID that is taken or of another depth, or an id twice among ``items``.
        """
        following = ItemCatalog.__new__(ItemCatalog)
        following._row, following._by_sid = dict(self._row), dict(self._by_sid)
        superseded = set(self.superseded)
        for row, item in enumerate(items, start=len(self)):
            if len(item.sid) != self.levels:
                raise CatalogError(
                    f"item {item.item_id!r}: SID {item.sid} is not {self.levels} levels"
                )
            other = following._by_sid.get(item.sid)
            if other is not None:
                raise CatalogError(f"item {item.item_id!r}: SID {item.sid} is taken")
            before = following._row.get(item.item_id)
            if before is not None:
                if before >= len(self):
                    raise CatalogError(f"item id {item.item_id!r} appears twice")
                superseded.add(before)
            following._row[item.item_id] = row
            following._by_sid[item.sid] = row
        following._items = (*self._items, *items)
        following.superseded = frozenset(superseded)
        return following

    def changed(self, items: Mapping[int, Item]) -> ItemCatalog:
        """A catalogue with other texts, attributes or popularity at some rows. O(N).

        Raises:
            CatalogError: another id or SID than the row has.
        """
        rows = list(self._items)
        for row, item in items.items():
            if (item.item_id, item.sid) != (rows[row].item_id, rows[row].sid):
                raise CatalogError(f"row {row} is item {rows[row].item_id!r} at {rows[row].sid}")
            rows[row] = item
        following = ItemCatalog.__new__(ItemCatalog)
        following._items, following.superseded = tuple(rows), self.superseded
        following._row, following._by_sid = self._row, self._by_sid
        return following

    def with_texts(self, texts: Mapping[ItemId, JsonDict]) -> ItemCatalog:
        """A catalogue whose items take title, description and attributes from ``texts``.

        ``texts[item_id]`` may hold "title", "description" and "attributes"; an item without an
        entry keeps what it has.
        """
        joined = []
        for item in self._items:
            text = texts.get(item.item_id, {})
            joined.append(
                Item(
                    item.item_id,
                    item.sid,
                    str(text.get("title", item.title)),
                    str(text.get("description", item.description)),
                    dict(text.get("attributes", item.attributes)),
                    item.popularity,
                )
            )
        return ItemCatalog(joined)
