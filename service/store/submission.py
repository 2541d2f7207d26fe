"""What of a submission is new: against the catalogue, and against the jobs before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gti_core.catalog import Item
from gti_core.data.dataset import ItemText
from gti_core.text import clean_text
from gti_core.types import ItemId
from service.store.database import job_items, jobs
from service.store.errors import ItemConflictError
from service.store.records import LIVE, UNFINISHED, items_to_json
from service.store.versions import chain_in

_MAX_CHARS = 20_000
_NAMED = 5


@dataclass(frozen=True)
class Submission:
    """A request to onboard items.

    Args:
        items: distinct ids, at least one.
        replace: whether an item with a known id and other content takes that item's place.
        key: the request's Idempotency-Key, or None.
    """

    items: tuple[ItemText, ...]
    replace: bool = False
    key: str | None = None

    @cached_property
    def body_hash(self) -> str:
        """sha256 over everything but the key, hex."""
        text = f"{self.replace} {items_to_json(self.items)}"
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def contents(self) -> dict[ItemId, str]:
        """`content_hash` by item id."""
        return {item.item_id: content_hash(item) for item in self.items}


@dataclass(frozen=True)
class Catalogued:
    """An item of the current catalogue.

    Args:
        content: its `content_hash`.
        available: whether it is in service.
    """

    content: str
    available: bool


def content_hash(item: Item | ItemText) -> str:
    """sha256 over title, description and attributes, hex; equal for texts that clean alike."""
    content = [
        clean_text(item.title, _MAX_CHARS),
        clean_text(item.description, _MAX_CHARS),
        dict(item.attributes),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sort_out(
    connection: Connection,
    submission: Submission,
    version: int,
    catalogued: Mapping[ItemId, Catalogued],
) -> tuple[list[ItemText], list[ItemId], str | None]:
    """Items to onboard, ids that are known already, and the one job that has all of them.

    The job is named only if every item waits in it, with nothing left to do.

    Raises:
        ItemConflictError: as `Jobs.submit`.
    """
    ids = [item.item_id for item in submission.items]
    waiting = _in_jobs(connection, ids, jobs.c.state.in_(UNFINISHED))
    chain = chain_in(connection, version)
    served = _in_jobs(connection, ids, (jobs.c.state == LIVE) & jobs.c.version.in_(chain))
    todo: list[ItemText] = []
    known: list[ItemId] = []
    other: list[ItemId] = []
    busy: list[ItemId] = []
    for item in submission.items:
        name, content = item.item_id, submission.contents[item.item_id]
        before = catalogued.get(name)
        if name in waiting:
            (known if waiting[name][1] == content else busy).append(name)
        elif before is None:
            todo.append(item)
        else:
            same = content in (before.content, served.get(name, ("", ""))[1])
            if same and before.available:
                known.append(name)
            elif submission.replace:
                todo.append(item)
            else:
                other.append(name)
    if busy:
        raise ItemConflictError(
            f"{_named(busy)} with other content in an unfinished job: wait for it or cancel it"
        )
    if other:
        raise ItemConflictError(
            f"{_named(other)} in the catalogue with other content, or out of service: send "
            '"replace": true for a new semantic ID, or PATCH the item'
        )
    holders = {waiting[name][0] for name in known if name in waiting}
    if not todo and holders:
        if len(holders) == 1 and all(name in waiting for name in known):
            return [], known, holders.pop()
        raise ItemConflictError(
            f"all items are known, but not from one job: wait for {', '.join(sorted(holders))}"
        )
    return todo, known, None


def _in_jobs(
    connection: Connection, ids: Sequence[ItemId], which: sa.ColumnElement[bool]
) -> dict[ItemId, tuple[str, str]]:
    """By item id: the latest such job that has it, and the content there."""
    rows = connection.execute(
        sa.select(job_items.c.item_id, jobs.c.id, job_items.c.content)
        .join(jobs, jobs.c.seq == job_items.c.job)
        .where(job_items.c.item_id.in_(ids), which)
        .order_by(jobs.c.seq)
    )
    return {row.item_id: (row.id, row.content) for row in rows}


def _named(ids: Sequence[ItemId]) -> str:
    names = ", ".join(repr(name) for name in ids[:_NAMED])
    more = len(ids) - _NAMED
    return f"{names} {f'and {more} more ' if more > 0 else ''}stand{'s' if len(ids) == 1 else ''}"
