"""Traces, through the public door: into memory, and over HTTP to a receiver."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from service.engine.base import EngineError, ServingModel
from service.engine.fake import FakeEngine
from service.logs import JsonFormatter, RequestIdFilter
from service.settings import ConfigError, load_settings
from service.telemetry.otlp import OtlpTracing, traces_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "r-1"}


class Traced:
    """An application whose spans stay in memory."""

    def __init__(self, make_client: Any, engine: FakeEngine) -> None:
        self._exporter = InMemorySpanExporter()
        self._tracing = OtlpTracing("http://unused", exporter=self._exporter)
        self.client = make_client(engine, app_options={"tracing": self._tracing}).wait_ready()

    def spans(self) -> list[ReadableSpan]:
        """All that ended."""
        self._tracing._provider.force_flush()
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        """The only span with a name."""
        [span] = [span for span in self.spans() if span.name == name]
        return span


@pytest.fixture
def traced(make_client: Any, tiny_model: ServingModel) -> Traced:
    return Traced(make_client, FakeEngine(tiny_model, delay_s=0.01))


def test_a_request_continues_its_caller_s_trace(traced: Traced) -> None:
    body = {"history": ["a1", "secret-id"], "k": 3}
    assert traced.client.post("/v1/recommendations", json=body, headers=HEADERS).is_success
    server = traced.named("POST /v1/recommendations")
    assert format(server.context.trace_id, "032x") == TRACE
    assert server.parent is not None
    assert format(server.parent.span_id, "016x") == PARENT
    assert dict(server.attributes or {}) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/recommendations",
        "gti.request_id": "r-1",
        "gti.version": 1,
    }
    whole = traced.named("recommend")
    assert whole.parent is not None
    assert whole.parent.span_id == server.context.span_id
    assert (whole.attributes or {})["gti.items"] == 3
    ends = whole.start_time
    assert ends is not None
    assert whole.end_time is not None
    for name in ("queue", "prefill", "beams", "render"):
        stage = traced.named(name)
        assert stage.parent is not None
        assert stage.parent.span_id == whole.context.span_id
        assert stage.start_time is not None
        assert stage.end_time is not None
        # One after the other; a millisecond for clocks that are read one after the other.
        assert ends - 1_000_000 <= stage.start_time <= stage.end_time <= whole.end_time
        ends = stage.end_time
    assert traced.named("prefill").end_time - traced.named("prefill").start_time >= 10_000_000  # type: ignore[operator]


def test_nothing_of_what_users_send_is_in_spans(traced: Traced) -> None:
    client = traced.client
    client.recommend(history=["a1", "secret-id"])
    client.get("/v1/items/secret-id?q=secret-query")
    client.get("/secret-path", headers={"User-Agent": "secret-agent", "Cookie": "secret"})
    client.recommend(history=["secret-id"], strict=True)
    client.recommend(query="secret words")
    assert len(traced.spans()) >= 5
    assert "secret" not in "".join(span.to_json() for span in traced.spans())


def test_failures_fallbacks_batches_and_probes(traced: Traced) -> None:
    client = traced.client
    for path in ("/livez", "/readyz", "/metrics"):
        client.get(path)
    assert traced.spans() == []
    bodies = [{"history": ["a1"]}, {"history": []}]
    client.post("/v1/recommendations:batch", json={"requests": bodies})
    batch = traced.named("POST /v1/recommendations:batch")
    found = [span for span in traced.spans() if span.name == "recommend"]
    assert sorted((span.attributes or {})["gti.fallback"] for span in found) == [False, True]
    assert {span.parent.span_id for span in found if span.parent} == {batch.context.span_id}
    assert len([span for span in traced.spans() if span.name == "render"]) == 2
    assert len([span for span in traced.spans() if span.name == "beams"]) == 1

    client.recommend(history=["a1"], timeout_ms=1)
    failed = traced.named("POST /v1/recommendations")
    assert (failed.attributes or {})["gti.problem"] == "deadline_exceeded"
    assert failed.status.status_code.name == "ERROR"
    assert failed.parent is None
    client.request("BREW", "/nothing")
    assert (traced.named("_OTHER").attributes or {})["http.response.status_code"] == 404


def test_log_lines_name_trace_version_and_problem(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(RequestIdFilter())
    with caplog.at_level(logging.INFO, logger="gti.access"):
        traced.client.post("/v1/recommendations", json={"history": ["a1"]}, headers=HEADERS)
        traced.client.get("/v1/items/nobody", headers=HEADERS)
    lines = [
        json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "gti.access"
    ]
    first, second = lines
    assert (first["trace_id"], first["request_id"], first["version"]) == (TRACE, "r-1", 1)
    assert "code" not in first
    assert (second["code"], second["trace_id"]) == ("item_not_found", TRACE)
    assert "version" not in second


class Receiver(BaseHTTPRequestHandler):
    """A collector for one test."""

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        message = ExportTraceServiceRequest.FromString(data)
        self.server.received.append((self.path, message))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[Any]:
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    server.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_a_collector(
    make_client: Any, tiny_model: ServingModel, collector: Any
) -> None:
    url = f"http://127.0.0.1:{collector.server_port}"
    client = make_client(FakeEngine(tiny_model), otlp_endpoint=url).wait_ready()
    client.recommend(history=["a1"])
    client.app.state.runtime.telemetry.tracing._provider.force_flush()
    assert {path for path, _ in collector.received} == {"/v1/traces"}
    names = {
        span.name
        for _, message in collector.received
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert {"POST /v1/recommendations", "recommend", "beams", "render"} <= names


def test_a_collector_that_is_gone_harms_no_request(
    make_client: Any, tiny_model: ServingModel, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(FakeEngine(tiny_model), otlp_endpoint="http://127.0.0.1:9").wait_ready()
    assert all(client.recommend(history=["a1"]).status_code == 200 for _ in range(20))


def test_without_an_endpoint_no_tracing_library_is_loaded() -> None:
    code = (
        "import sys; from service.app import openapi_document; openapi_document(); "
        "sys.exit(any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://collector.example/otlp/traces", "https://collector.example/otlp/traces"),
    ],
)
def test_traces_url(given: str, wanted: str) -> None:
    assert traces_url(given) == wanted


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector", "http://", "a b"])
def test_what_is_no_collector(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-endpoint \(GTI_OTLP_ENDPOINT\)"):
        load_settings({"otlp_endpoint": endpoint})


def test_publishing_has_a_span_and_keeps_its_errors_words_out() -> None:
    exporter = InMemorySpanExporter()
    tracing = OtlpTracing("http://unused", exporter=exporter)
    with tracing.publishing(7):
        pass
    with pytest.raises(EngineError), tracing.publishing(8):
        raise EngineError("secret title")
    tracing.stop()
    first, second = exporter.get_finished_spans()
    assert first.name == second.name == "publish version"
    assert dict(first.attributes or {}) == {"gti.version": 7}
    assert (first.status.status_code.name, second.status.status_code.name) == ("UNSET", "ERROR")
    assert "secret" not in second.to_json()
