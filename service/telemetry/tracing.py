"""What the service needs of a tracer. Imports no tracing library: `otlp` does, when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from starlette.types import ASGIApp

from service.engine.timings import Timings


class Tracing:
    """Writes spans. This one writes none; `service.telemetry.otlp.OtlpTracing` does.

    Never raises for a request's sake, and holds nothing of what users send.
    """

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The application with a span around each request."""
        return app

    def recommended(
        self,
        timings: Timings | None,
        decoded: float,
        total_s: float,
        attributes: Mapping[str, str | int | bool],
    ) -> None:
        """Spans of a recommendation that ends now and of its stages, under the request's.

        Args:
            timings: the engine's; None when it was not asked.
            decoded: when the render stage began, `time.monotonic`.
            total_s: how long it took, seconds.
            attributes: of its span.
        """

    def publishing(self, version: int) -> AbstractContextManager[None]:
        """A span around the publishing of a version."""
        return nullcontext()

    def stop(self) -> None:
        """Send what is left. Blocks for a few seconds at most."""


def open_tracing(endpoint: str | None) -> Tracing:
    """A tracer for a collector's URL; for None one that does nothing and costs nothing."""
    if endpoint is None:
        return Tracing()
    from service.telemetry.otlp import OtlpTracing

    return OtlpTracing(endpoint)
