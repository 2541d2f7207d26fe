"""Follower: brings the engine to the version that the store says is current.

It is the only caller of `Engine.publish`: at the start, after a change made here, and after one
that a worker or another replica made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace

import numpy as np

from gti_core.bundle.delta import CatalogState, Rows
from gti_core.errors import BundleError
from service.engine.base import (
    CatalogChange,
    Engine,
    EngineDeadError,
    EngineError,
    ServingModel,
)
from service.onboarding.faults import fault
from service.onboarding.states import States
from service.store import Store
from service.store.errors import StoreError
from service.telemetry.telemetry import Telemetry

logger = logging.getLogger(__name__)

POLL_S = 0.5


class Follower:
    """Follows one store with one engine. Lives on one event loop.

    Args:
        store: says what is current.
        states: computes versions.
        engine: a started engine that serves the base, version 1.
        poll_s: seconds between looks at the store.
        telemetry: is told of what is published; None: nobody is.
    """

    def __init__(
        self,
        store: Store,
        states: States,
        engine: Engine,
        *,
        poll_s: float = POLL_S,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._store = store
        self._states = states
        self._engine = engine
        self._poll_s = poll_s
        self._base = engine.model
        self._served = engine.model.version
        self._telemetry = telemetry or Telemetry()
        self._newest = engine.model.version
        self._started = False
        self._marked: int | None = None
        self._written: frozenset[int] = frozenset()
        self._refusals: dict[int, str] = {}
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._copy_due = False
        self._task: asyncio.Task[None] | None = None

    @property
    def served(self) -> int:
        """Number of the version being served."""
        return self._served

    def refusal(self, number: int) -> str | None:
        """Why the engine did not take a version when it was last asked to, or None."""
        return self._refusals.get(number)

    async def start(self) -> None:
        """Catch up with the store, then follow it.

        Raises:
            StoreError: the store can't be read.
            BundleError: the current version can't be computed.
            EngineError: the engine does not take the current version, which was served before.
        """
        await self.sync()
        self._started = True
        self._task = asyncio.create_task(self._follow(), name="follower")

    async def stop(self) -> None:
        """Stop following. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def sync(self) -> None:
        """Serve what is current now. A version that the engine refuses is turned back from.

        Raises:
            StoreError: the store can't be read or written.
            EngineDeadError: the engine is gone.
        """
        async with self._lock:
            while not await self._step():
                pass

    async def wait_for(self, version: int, timeout_s: float) -> int:
        """Wait until a version with at least this number is served; returns the one served."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._served < version:
                    await self._changed.wait()
        return self._served

    async def _step(self) -> bool:
        """One look at the store; true when there is nothing more to do."""
        head = await asyncio.to_thread(self._store.versions.head)
        number = head.current
        if number != self._served:
            try:
                plan = await asyncio.to_thread(self._plan, number)
                fault("before_swap")
                with self._telemetry.publishing(number):
                    await self._engine.publish(plan.model, rows=plan.rows, change=plan.change)
            except EngineDeadError:
                raise
            except (EngineError, BundleError, ValueError) as error:
                await self._turn_back(number, error)
                return False
            fault("after_swap")
            if plan.rows is not None:
                self._written |= frozenset(plan.rows.numbers.tolist())
            self._served = number
            self._refusals.pop(number, None)
            self._changed.set()
            self._changed = asyncio.Event()
            logger.info("version %d is served: %d items", number, len(plan.model.catalog))
            await self._count_new_items(number)
        if head.publishing or self._marked != number:
            await asyncio.to_thread(self._store.versions.mark_served, number)
            self._marked = number
            self._copy_due = True
        return True

    async def _count_new_items(self, number: int) -> None:
        """Measure how long items took from their POST to here. A way back adds none."""
        if number <= self._newest:
            return
        above, self._newest = self._newest, number
        try:
            # At the start most versions are old: only those that were never served count.
            posted = await asyncio.to_thread(
                self._store.versions.posted, number, above=above, unserved=not self._started
            )
        except StoreError as error:
            logger.warning("how long new items took is not known: %s", error)
            return
        for items, created_at in posted:
            self._telemetry.meters.served(items, max(0.0, time.time() - created_at))

    async def _turn_back(self, number: int, error: Exception) -> None:
        logger.error("version %d can't be served: %s", number, error)
        record = await asyncio.to_thread(self._store.versions.get, number)
        if record.served and not self._started:
            raise error
        reason = f"version {number} can't be served: {error}"
        self._refusals[number] = reason
        await asyncio.to_thread(self._store.versions.refuse, number, reason, self._served)

    async def _follow(self) -> None:
        broken = False
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await asyncio.to_thread(self._store.jobs.expire)
                await self.sync()
                broken = False
                if self._copy_due and await asyncio.to_thread(self._store.keep_copy):
                    self._copy_due = False
            except EngineDeadError:
                return  # the runtime sees it too and ends the service
            except StoreError as error:
                if not broken:
                    logger.error("following the store: %s", error)
                broken = True
            except Exception:
                logger.exception("following the store failed")

    def _plan(self, number: int) -> Plan:
        before, after = self._states.at(self._served), self._states.at(number)
        model = replace(
            self._base,
            vocabulary=after.vocabulary,
            catalog=after.catalog,
            index=after.index,
            version=number,
        )
        rows = _new_rows(after, self._written)
        change = None
        if self._served in self._store.versions.chain(number):
            change = catalog_change(self._served, before, after)
        return Plan(model, rows, change)


@dataclass(frozen=True)
class Plan:
    """Arguments of `Engine.publish`."""

    model: ServingModel
    rows: Rows | None
    change: CatalogChange | None


def catalog_change(number: int, before: CatalogState, after: CatalogState) -> CatalogChange:
    """How a version differs from one it descends from.

    Args:
        number: of the ancestor.
        before: its state.
        after: the descendant's state; its catalogue has the ancestor's rows first.
    """
    count = len(before.catalog)
    old, new = before.index.available, after.index.available
    return CatalogChange(
        number,
        after.catalog.sids[count:],
        new[count:],
        tuple(int(row) for row in np.flatnonzero(old & ~new[:count])),
        tuple(int(row) for row in np.flatnonzero(~old & new[:count])),
    )


def _new_rows(state: CatalogState, written: frozenset[int]) -> Rows | None:
    if state.rows is None:
        return None
    fresh = np.array([int(n) not in written for n in state.rows.numbers], dtype=np.bool_)
    return state.rows.chosen(fresh) if fresh.any() else None
