"""Spans for an OTLP collector. The one module that imports OpenTelemetry, and only when it is on.

The provider is the application's own, not the process's: nothing else writes into it, and several
applications in one process keep apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service import __version__
from service.asgi import PROBE_PATHS, StatusWatch
from service.engine.timings import Timings
from service.logs import trace_id_var
from service.telemetry.meters import CLIENT_CLOSED, METHODS
from service.telemetry.tracing import Tracing

_TIMEOUT_S = 5.0
_TRACES_PATH = "/v1/traces"


class OtlpTracing(Tracing):
    """See `service.telemetry.tracing.Tracing`. A thread of the library sends spans in batches.

    Args:
        endpoint: URL of the collector; ``/v1/traces`` is added where it has no path.
        exporter: takes the spans instead, for tests.
    """

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        if exporter is None:
            exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_TIMEOUT_S)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "gti-serve", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("gti-serve", __version__)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """The application with a span around each request."""
        return _TracedRequests(app, self._tracer)

    def recommended(
        self,
        timings: Timings | None,
        decoded: float,
        total_s: float,
        attributes: Mapping[str, str | int | bool],
    ) -> None:
        """See `service.telemetry.tracing.Tracing.recommended`."""
        now, now_ns = time.monotonic(), time.time_ns()

        def at(moment: float) -> int:
            return now_ns - int((now - moment) * 1e9)

        began = now - total_s
        whole = self._tracer.start_span("recommend", attributes=attributes, start_time=at(began))
        inside = trace.set_span_in_context(whole)
        if timings is not None:
            moment = timings.asked
            for name, seconds in (
                ("queue", timings.queue_s),
                ("prefill", timings.prefill_s),
                ("beams", timings.beams_s),
            ):
                if seconds is not None:
                    stage = self._tracer.start_span(name, inside, start_time=at(moment))
                    moment += seconds
                    stage.end(at(moment))
        self._tracer.start_span("render", inside, start_time=at(decoded)).end(now_ns)
        whole.end(now_ns)

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """See `service.telemetry.tracing.Tracing.publishing`."""
        with self._tracer.start_as_current_span(
            "publish version",
            attributes={"gti.version": version},
            # An exception's words may quote an item.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except BaseException:
                span.set_status(Status(StatusCode.ERROR))
                raise

    def stop(self) -> None:
        """Send what is left. Blocks for a few seconds at most."""
        self._provider.shutdown()


class _TracedRequests:
    """Pure ASGI middleware: the span of a request, whose parent may be the caller's."""

    def __init__(self, app: ASGIApp, tracer: trace.Tracer) -> None:
        self._app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        parent = self._propagator.extract(Headers(scope=scope), context=Context())
        span = self._tracer.start_span(method, parent, kind=SpanKind.SERVER)
        token = otel_context.attach(trace.set_span_in_context(span, parent))
        logged = trace_id_var.set(trace.format_trace_id(span.get_span_context().trace_id))
        watch = StatusWatch(send, CLIENT_CLOSED)
        try:
            await self._app(scope, receive, watch)
        finally:
            _describe(span, method, watch.status, scope.get("state", {}))
            span.end()
            trace_id_var.reset(logged)
            otel_context.detach(token)


def _describe(span: Span, method: str, status: int, state: Mapping[str, object]) -> None:
    """Attributes that are known only at the end; none holds what the user sent."""
    route = state.get("route")
    span.update_name(f"{method} {route}" if route else method)
    span.set_attribute("http.request.method", method)
    span.set_attribute("http.response.status_code", status)
    for name, key in (
        ("http.route", "route"),
        ("gti.request_id", "request_id"),
        ("gti.version", "version"),
        ("gti.problem", "problem"),
    ):
        value = state.get(key)
        if isinstance(value, str | int):
            span.set_attribute(name, value)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def traces_url(endpoint: str) -> str:
    """Where spans go: the endpoint, with OTLP's own path where it has none."""
    bare = not urlsplit(endpoint).path.strip("/")
    return endpoint.rstrip("/") + _TRACES_PATH if bare else endpoint
