"""Refuses recommendations before they are read, while the engine has more to do than it may.

Reading a request, judging it and looking its items up takes a few milliseconds. At many times the
capacity nearly all of that would be spent on requests that are refused at its end, and taken from
the engine, which shares the processor on small machines, and from probes, which share the loop.
"""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import OverloadedError
from service.problems import problem_response
from service.runtime import Runtime

logger = logging.getLogger(__name__)

PATH = "/v1/recommendations"
"""The one door that is watched. A batch is read: its requests take turns."""
SAY_EVERY_S = 10.0


class OverloadDoor:
    """Pure ASGI middleware, inside the one that asks for keys.

    A request is taken for one of the default beam width; a wider one is judged again when it has
    been read. Popular items need no engine, but nobody knows yet who gets them.

    Args:
        app: the application.
        runtime: whose admission is asked.
    """

    def __init__(self, app: ASGIApp, runtime: Runtime) -> None:
        self.app = app
        self._runtime = runtime
        self._refused = 0
        self._said = -SAY_EVERY_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        width = self._runtime.settings.default_beam_width
        retry_after_s = self._runtime.admission.full_for(width)
        if retry_after_s is None:
            await self.app(scope, receive, send)
            return
        self._say()
        # A line for each would cost more than the refusal; metrics count them.
        scope["state"]["quiet"] = True
        error = OverloadedError(
            "the work under way fills the engine for as long as a request may wait", retry_after_s
        )
        await problem_response(error, scope["state"]["request_id"])(scope, receive, send)

    def _say(self) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            logger.warning("overloaded: %d requests refused unread", self._refused)
            self._said, self._refused = now, 0
