"""The selections of one version that vLLM's worker holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.engine.base import EngineError, Selection

HELD_SELECTIONS = 64
"""Selections of a version that the worker keeps, 4 bytes per item each; least recently used go."""


@dataclass(eq=False)
class _Held:
    """A selection in the worker: made once ``ready``, kept while it has users."""

    ready: asyncio.Future[Any]
    users: int = 0


class HeldSelections:
    """Sends a selection to the worker once, however many requests share it.

    Args:
        version: the version whose rows the masks are about.
        call: calls a method of the worker.
        keep: holds a future until it is done.
    """

    def __init__(
        self,
        version: int,
        call: Callable[..., Coroutine[Any, Any, Any]],
        keep: Callable[[asyncio.Future[Any]], None],
    ) -> None:
        self._version = version
        self._call = call
        self._keep = keep
        self._held: dict[str, _Held] = {}
        """By key, least recently used first."""

    @asynccontextmanager
    async def holding(self, selection: Selection | None) -> AsyncIterator[None]:
        """Have a selection in the worker, made there if need be, and keep it there meanwhile.

        Raises:
            EngineError: the worker failed, or too many different selections are in use at once.
        """
        if selection is None:
            yield
            return
        held = await self._hold(selection)
        try:
            yield
        finally:
            held.users -= 1

    def close(self) -> None:
        """Give up those that are being made."""
        held, self._held = self._held, {}
        for one in held.values():
            one.ready.cancel()

    async def _hold(self, selection: Selection) -> _Held:
        held = self._held.pop(selection.key, None)
        if held is None:
            held = _Held(asyncio.ensure_future(self._make(selection)))
            self._keep(held.ready)
        self._held[selection.key] = held
        held.users += 1
        try:
            await asyncio.shield(held.ready)
        except BaseException:
            held.users -= 1
            failed = held.ready.done() and (held.ready.cancelled() or held.ready.exception())
            if failed and self._held.get(selection.key) is held:
                del self._held[selection.key]
            raise
        return held

    async def _make(self, selection: Selection) -> None:
        idle = [key for key, held in self._held.items() if not held.users]
        forgotten = idle[: max(0, len(self._held) - HELD_SELECTIONS)]
        for key in forgotten:
            del self._held[key]
        if forgotten:
            # Sent before anyone else runs: a selection asked for again is made after this.
            await self._call("gti_unselect", self._version, forgotten)
        if len(self._held) > HELD_SELECTIONS:
            raise EngineError(f"{HELD_SELECTIONS} different selections are in use at once")
        packed = np.packbits(selection.mask.astype(np.bool_)).tobytes()
        await self._call("gti_select", self._version, selection.key, packed)
