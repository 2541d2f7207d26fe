"""How many beams may be under way in an engine at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class BeamGate:
    """Lets requests in, first come first served, while their beams together stay within a bound.

    What waits here is not in the engine's queue, so that one step of the engine stays short however
    many wide requests come at once.

    Args:
        beams: the bound, at least 1. A wider request goes in alone.
    """

    def __init__(self, beams: int) -> None:
        self._bound = beams
        self._inside = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(not turn.cancelled() for _, turn in self._queue)

    @asynccontextmanager
    async def enter(self, width: int) -> AsyncIterator[None]:
        """Wait for room for ``width`` beams and hold it. Cancelling gives up place and room."""
        width = min(width, self._bound)
        if self._queue or self._inside + width > self._bound:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append((width, turn))
            try:
                await turn
            except asyncio.CancelledError:
                # Let in and cancelled at the same moment, it has room to give back.
                self._leave(0 if turn.cancelled() else width)
                raise
        else:
            self._inside += width
        try:
            yield
        finally:
            self._leave(width)

    def _leave(self, width: int) -> None:
        self._inside -= width
        self._admit()

    def _admit(self) -> None:
        while self._queue:
            width, turn = self._queue[0]
            if not turn.cancelled():
                if self._inside + width > self._bound:
                    return
                self._inside += width
                turn.set_result(None)
            self._queue.popleft()
