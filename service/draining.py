"""The orderly end: on SIGTERM, accepted work finishes, new work is refused, liveness stays true."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.asgi import PROBE_PATHS
from service.errors import not_ready
from service.problems import problem_response

logger = logging.getLogger(__name__)


class WorkCount:
    """Requests that the service has accepted and not answered yet."""

    def __init__(self) -> None:
        self.under_way = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """A request was accepted."""
        self.under_way += 1
        self._idle.clear()

    def end(self) -> None:
        """Its answer has been sent, or nobody waits for it any more."""
        self.under_way -= 1
        if not self.under_way:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work from now on; true once all that was accepted is done."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class DrainMiddleware:
    """Counts requests; while draining, refuses new ones and asks clients to reconnect elsewhere.

    Args:
        app: the application.
        work: the count.
    """

    def __init__(self, app: ASGIApp, work: WorkCount) -> None:
        self.app = app
        self.work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self.app(scope, receive, send)
            return

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self.work.draining:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        if self.work.draining:
            error = not_ready("the service is stopping", "stopping")
            answer = problem_response(error, scope["state"]["request_id"])
            await answer(scope, receive, send_and_close)
            return
        self.work.begin()
        try:
            await self.app(scope, receive, send_and_close)
        finally:
            self.work.end()


class DrainingServer(uvicorn.Server):
    """A server that drains before it closes its socket.

    A second signal ends it at once.

    Args:
        config: uvicorn's.
        drain: refuses new work and returns when the accepted work is done.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._asked = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; remembers the loop."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self._loop is None or self._asked or self.should_exit:
            super().handle_exit(sig, frame)
            return
        self._asked = True
        self._loop.call_soon_threadsafe(self._begin, sig)

    def _begin(self, sig: int) -> None:
        self._draining = asyncio.get_running_loop().create_task(self._drain_and_end(sig))

    async def _drain_and_end(self, sig: int) -> None:
        logger.info("stopping: no new work, accepted work finishes")
        try:
            await self._drain()
        finally:
            super().handle_exit(sig, None)
