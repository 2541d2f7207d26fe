"""What the store hands out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gti_core.data.dataset import ItemText, text_record
from gti_core.types import ItemId, JsonDict

QUEUED, PUBLISHING, LIVE = "queued", "publishing", "live"
REJECTED, FAILED, CANCELLED = "rejected", "failed", "cancelled"
WORKING = ("encoding", "assigning", "grounding", "validating")
UNFINISHED = (QUEUED, *WORKING, PUBLISHING)
ENDED = (LIVE, REJECTED, FAILED, CANCELLED)
STATES = (*UNFINISHED, *ENDED)


@dataclass(frozen=True)
class VersionRecord:
    """A version without its delta.

    Args:
        number: 1 is the base bundle; numbers only grow.
        parent: the version it was made from; None for the base.
        kind: base, onboard, retire, restore or attributes.
        created_at: seconds since 1970.
        added: items it added.
        retired: items it took out of service.
        job_id: the job it came from, if any.
        digest: of the delta; of the bundle for the base.
        served: whether an engine has ever served it.
        refused: why the engine did not take it.
        current: whether it is the one to be served.
    """

    number: int
    parent: int | None
    kind: str
    created_at: float
    added: int
    retired: int
    job_id: str | None
    digest: str
    served: bool
    refused: str | None
    current: bool


@dataclass(frozen=True)
class JobRecord:
    """A job without its proposal.

    Args:
        seq: orders the jobs.
        job_id: random, hex.
        kind: onboard.
        state: one of `STATES`.
        created_at: seconds since 1970.
        updated_at: seconds since 1970.
        items: those to be onboarded; empty in a listing.
        todo: how many they are.
        known: ids of the request that were there already.
        progress: {"stage", "done", "of"}, or None.
        result: {"verdicts", "reasons", "figures"}, or None; None in a listing.
        error: why it failed.
        attempts: times a worker began.
        version: the version that has its items.
    """

    seq: int
    job_id: str
    kind: str
    state: str
    created_at: float
    updated_at: float
    items: tuple[ItemText, ...]
    todo: int
    known: tuple[ItemId, ...]
    progress: JsonDict | None
    result: JsonDict | None
    error: str | None
    attempts: int
    version: int | None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ENDED


@dataclass(frozen=True)
class Claim:
    """A job that a worker has a lease on.

    Args:
        job_id: the job.
        worker: the worker's name.
        attempt: which try this is, from 1; with the name it makes the lease's token.
        items: those to be onboarded.
        first_code: first code of the last level that was kept for it.
        code_end: one more than the last.
        proposal: (base version, document, block) that an earlier try left, or None.
    """

    job_id: str
    worker: str
    attempt: int
    items: tuple[ItemText, ...]
    first_code: int
    code_end: int
    proposal: tuple[int, str, bytes | None] | None


def job_record(row: Any) -> JobRecord:
    """From a row of the table."""
    return JobRecord(
        row.seq,
        row.id,
        row.kind,
        row.state,
        row.created_at,
        row.updated_at,
        items_from_json(row.items),
        row.todo,
        tuple(json.loads(row.known)),
        None if row.progress is None else json.loads(row.progress),
        None if row.result is None else json.loads(row.result),
        row.error,
        row.attempts,
        row.version,
    )


def items_to_json(items: Sequence[ItemText]) -> str:
    """Items as JSON text, ASCII."""
    return json.dumps([text_record(item) for item in items], allow_nan=False)


def items_from_json(text: str) -> tuple[ItemText, ...]:
    """Inverse of `items_to_json`."""
    return tuple(
        ItemText(r["item_id"], r["title"], r["description"], r["attributes"])
        for r in json.loads(text)
    )
