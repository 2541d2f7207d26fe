"""What metrics and traces cost per request: the same application with and without them.

    python -m bench.telemetry [--rounds N] [--requests N] [--json FILE]

Requests go straight into the ASGI application over the demo bundle and the fake engine, one after
the other, without a socket. Rounds of the variants alternate; told is, per variant, the median over
the rounds of the mean processor time of a request, in microseconds. ``bare`` lacks the middleware,
``metrics`` is the service as it ships, ``traces`` has a tracer too, whose spans go nowhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from fastapi import FastAPI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bench.output import load_average, publish
from gti_core.bundle import DEMO_BUNDLE, load_bundle
from service.app import create_app
from service.context import ServingContext
from service.engine.fake import FakeEngine
from service.settings import Settings
from service.telemetry.middleware import MetricsMiddleware
from service.telemetry.otlp import OtlpTracing

VARIANTS = ("bare", "metrics", "traces")
REQUESTS = {
    "livez": ("GET", "/livez", b""),
    "item": ("GET", "/v1/items/50", b""),
    "recommendations": (
        "POST",
        "/v1/recommendations",
        json.dumps({"history": ["50", "258"], "k": 10}).encode(),
    ),
}


def application(variant: str, context: ServingContext) -> FastAPI:
    """An application over the fake engine."""
    tracing = None
    if variant == "traces":
        tracing = OtlpTracing("http://unused", exporter=InMemorySpanExporter())
    app = create_app(
        context,
        Settings(engine="fake", audit_log="off"),
        lambda _: FakeEngine(context.model(Path("unused"))),
        load_encoder=lambda: None,  # type: ignore[arg-type, return-value]
        tracing=tracing,
    )
    if variant == "bare":
        app.user_middleware = [
            one for one in app.user_middleware if one.cls is not MetricsMiddleware
        ]
    return app


async def ask(app: FastAPI, method: str, path: str, body: bytes) -> int:
    """Send one request; returns its status."""
    status = 0
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    await app(
        {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
        },
        receive,
        send,
    )
    return status


async def measure(rounds: int, requests: int) -> dict[str, dict[str, float]]:
    """Request -> variant -> microseconds of processor time per request."""
    context = ServingContext.from_bundle(load_bundle(DEMO_BUNDLE))
    async with AsyncExitStack() as stack:
        apps = {}
        for variant in VARIANTS:
            app = apps[variant] = application(variant, context)
            await stack.enter_async_context(app.router.lifespan_context(app))
            async with asyncio.timeout(60):
                while await ask(app, "GET", "/readyz", b"") != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        found: dict[str, dict[str, float]] = {}
        for name, request in REQUESTS.items():
            times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            for _ in range(rounds + 1):  # the first warms up
                for variant, app in apps.items():
                    began = time.thread_time()
                    for _ in range(requests):
                        assert await ask(app, *request) == 200
                    times[variant].append((time.thread_time() - began) / requests * 1e6)
            found[name] = {v: round(median(values[1:]), 1) for v, values in times.items()}
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.telemetry")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    load = load_average()
    found = asyncio.run(measure(options.rounds, options.requests))
    publish(
        "telemetry",
        arguments,
        options.json,
        load,
        unit="microseconds of processor time per request",
        requests=found,
    )


if __name__ == "__main__":
    main()
