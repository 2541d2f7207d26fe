"""Pure ASGI middleware that counts and times every request, whoever answers it."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from service.asgi import StatusWatch
from service.telemetry.meters import CLIENT_CLOSED, Meters


class MetricsMiddleware:
    """Stands outside of all that may answer, so that refusals and failures count too.

    The route comes from the gate, which has looked it up already, and the problem's code from the
    answer: both stand in ``scope["state"]``. A request whose client went away unanswered, or that
    was cancelled, counts as 499.

    Args:
        app: the application.
        meters: count.
    """

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        started = time.perf_counter()
        watch = StatusWatch(send, CLIENT_CLOSED)
        try:
            await self._app(scope, receive, watch)
        finally:
            self._meters.request(
                scope["method"],
                state.get("route"),
                watch.status,
                time.perf_counter() - started,
                state.get("problem"),
            )
