"""Admin: what the admin routes do, over the store and the follower. Nothing blocks the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gti_core.bundle.delta import CatalogState, Delta
from gti_core.types import ItemId, JsonDict
from service.engine.base import EngineError
from service.onboarding.faults import fault
from service.onboarding.follower import Follower
from service.onboarding.states import States
from service.store import Store
from service.store.errors import StaleVersionError, UnknownItemError
from service.store.records import ENDED, JobRecord, VersionRecord
from service.store.submission import Catalogued, Submission, content_hash
from service.store.workers import WorkerCounts

WAIT_POLL_S = 0.1

_T = TypeVar("_T")


@dataclass(frozen=True)
class ItemState:
    """An item after a change.

    Args:
        item_id: its id.
        version: a version that has the change, being served.
        available: whether it is in service.
    """

    item_id: ItemId
    version: int
    available: bool


class Admin:
    """Jobs, changes of items, and versions. Every method raises StoreError.

    Args:
        store: the store.
        states: computes versions.
        follower: brings the engine to what was committed.
    """

    def __init__(self, store: Store, states: States, follower: Follower) -> None:
        self._store = store
        self._states = states
        self._follower = follower

    async def submit(self, submission: Submission) -> tuple[JobRecord, bool]:
        """Accept items to onboard; returns the job and whether it is new.

        Raises:
            RefusedError: as `Jobs.submit`.
        """

        def work() -> tuple[JobRecord, bool]:
            number = self._store.versions.current()
            known = catalogued(self._states.at(number), submission)
            return self._store.jobs.submit(submission, number, known)

        return await _until_fresh(work)

    async def job(self, job_id: str) -> JobRecord:
        """One job. Raises JobNotFoundError."""
        return await asyncio.to_thread(self._store.jobs.get, job_id)

    async def wait(self, job: JobRecord, timeout_s: float) -> JobRecord:
        """The job as soon as it has ended, or as it is after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if await asyncio.to_thread(self._store.jobs.state, job.job_id) in ENDED:
                break
            await asyncio.sleep(WAIT_POLL_S)
        return await self.job(job.job_id)

    async def jobs(self, limit: int, state: str | None, before: int | None) -> list[JobRecord]:
        """Jobs, latest first."""
        return await asyncio.to_thread(self._store.jobs.page, limit, state=state, before=before)

    async def cancel(self, job_id: str) -> JobRecord:
        """Cancel a job. Raises JobNotFoundError, JobNotCancellableError."""
        return await asyncio.to_thread(self._store.jobs.cancel, job_id)

    async def change(
        self,
        item_id: ItemId,
        *,
        available: bool | None = None,
        attributes: JsonDict | None = None,
    ) -> ItemState:
        """Take an item out of service or back, or give it other attributes; served on return.

        Raises:
            UnknownItemError: no such item.
            EngineError: the engine did not take the change; it is not in force.
        """

        def work() -> tuple[int, bool]:
            number = self._store.versions.current()
            state = self._states.at(number)
            kind, delta, now = _item_change(state, item_id, available, attributes)
            if delta is not None:
                state.apply(delta)
                fault("before_commit")
                number = self._store.versions.commit(number, kind, delta)
                fault("after_commit")
            return number, now

        number, now = await _until_fresh(work)
        await self._serve(number)
        return ItemState(item_id, number, now)

    async def versions(self, limit: int, before: int | None) -> list[VersionRecord]:
        """Versions, latest first."""
        return await asyncio.to_thread(self._store.versions.page, limit, before)

    async def activate(self, number: int) -> VersionRecord:
        """Make a version current and serve it.

        Raises:
            VersionNotFoundError: no such version, or one that was refused.
            EngineError: the engine did not take it; the one before is served.
        """
        # Computed first, so that what can't be served never becomes current.
        await asyncio.to_thread(self._states.at, number)
        await asyncio.to_thread(self._store.versions.activate, number)
        await self._serve(number)
        return await asyncio.to_thread(self._store.versions.get, number)

    async def workers(self) -> WorkerCounts:
        """Grounding workers heard of lately. Raises StoreError."""
        return await asyncio.to_thread(self._store.workers.counts)

    async def codes_left(self) -> int:
        """How many more items can be onboarded."""
        return await asyncio.to_thread(self._store.codes_left)

    async def wait_for_version(self, version: int, timeout_s: float) -> int:
        """Wait until a version with at least this number is served; returns the one served."""
        return await self._follower.wait_for(version, timeout_s)

    async def _serve(self, number: int) -> None:
        await self._follower.sync()
        if self._follower.refusal(number) is not None:
            raise EngineError(f"the engine did not take version {number}")


async def _until_fresh(work: Callable[[], _T]) -> _T:
    while True:
        try:
            return await asyncio.to_thread(work)
        except StaleVersionError:
            continue


def catalogued(state: CatalogState, submission: Submission) -> dict[ItemId, Catalogued]:
    """Those of a submission's items that a version has."""
    known = {}
    for name in submission.contents:
        if name in state.catalog:
            row = state.catalog.row(name)
            item = state.catalog.items[row]
            known[name] = Catalogued(content_hash(item), state.index.in_service(row))
    return known


def _item_change(
    state: CatalogState, item_id: ItemId, available: bool | None, attributes: JsonDict | None
) -> tuple[str, Delta | None, bool]:
    """Kind of version, delta (None where nothing changes), whether the item is in service then."""
    if item_id not in state.catalog:
        raise UnknownItemError(f"no item {item_id!r} in the catalogue")
    row = state.catalog.row(item_id)
    before = state.index.in_service(row)
    now = before if available is None else available
    changed = {}
    if attributes is not None and dict(state.catalog.items[row].attributes) != attributes:
        changed[item_id] = attributes
    if now == before and not changed:
        return "", None, now
    kind = "attributes" if now == before else "restore" if now else "retire"
    moved = (item_id,) if now != before else ()
    delta = Delta(
        state.vocabulary,
        retired=moved if not now else (),
        restored=moved if now else (),
        attributes=changed,
    )
    return kind, delta, now
