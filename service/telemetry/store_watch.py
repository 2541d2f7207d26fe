"""What the store says, for those who look often: read in a thread, seldom, and never waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from service.store.errors import StoreError
from service.store.store import StoreSummary

logger = logging.getLogger(__name__)

FRESH_S = 3.0
WAIT_S = 1.0


class StoreWatch:
    """Keeps the latest summary of a store. Lives on one event loop.

    Args:
        read: reads it; blocks, may raise StoreError.
        fresh_s: seconds after which it is read again.
        wait_s: seconds that a caller waits for a reading.
    """

    def __init__(
        self, read: Callable[[], StoreSummary], *, fresh_s: float = FRESH_S, wait_s: float = WAIT_S
    ) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._wait_s = wait_s
        self._task: asyncio.Task[StoreSummary | None] | None = None
        self._begun = 0.0

    async def latest(self) -> StoreSummary | None:
        """The summary, at most ``fresh_s`` old; None when the store fails or is too slow."""
        now = time.monotonic()
        if self._task is None or (self._task.done() and now - self._begun >= self._fresh_s):
            # One reading at a time: a store that hangs must not pile them up.
            self._task, self._begun = asyncio.create_task(self._reading()), now
        await asyncio.wait({self._task}, timeout=self._wait_s)
        return self._task.result() if self._task.done() else None

    async def _reading(self) -> StoreSummary | None:
        try:
            return await asyncio.to_thread(self._read)
        except StoreError as error:
            logger.debug("the store can't be read for the metrics: %s", error)
        except Exception:
            # A fault of ours, or a store that is being closed: a scrape answers all the same.
            logger.exception("reading the store for the metrics failed")
        return None
