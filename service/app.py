"""The FastAPI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from service import __version__
from service.access.credentials import KEY_HEADER
from service.access.gate import AccessGate
from service.access.openapi import secure
from service.access.rules import allowed_methods
from service.access.start import open_audit, open_keyring, open_limiter
from service.api import (
    admin_items,
    admin_jobs,
    admin_versions,
    health,
    info,
    items,
    metrics,
    recommendations,
)
from service.api.deps import problems
from service.context import ServingContext
from service.draining import DrainMiddleware
from service.engine.base import EngineError
from service.errors import ServiceError
from service.middleware import (
    REQUEST_ID_HEADER,
    BodyLimitMiddleware,
    HeadMiddleware,
    RequestContextMiddleware,
)
from service.onboarding.running import Onboarding
from service.overload_door import OverloadDoor
from service.problems import kind_of, problem_response
from service.runtime import BuildEngine, LoadEncoder, Runtime
from service.schemas import Problem
from service.settings import Settings
from service.store.errors import RefusedError, StoreError
from service.telemetry.middleware import MetricsMiddleware
from service.telemetry.telemetry import Telemetry
from service.telemetry.tracing import Tracing, open_tracing

logger = logging.getLogger(__name__)

TITLE = "GTI Serve"
DESCRIPTION = (
    "Recommendations from a language model that writes semantic IDs, under a constraint that "
    "admits the catalogue's items only. Errors are application/problem+json with a stable `code`."
)
_TAGS = [
    {"name": "recommendations", "description": "Items for a history or a search query."},
    {"name": "items", "description": "The catalogue."},
    {"name": "admin", "description": "New items, changes of items, jobs and versions."},
    {"name": "info", "description": "What runs here and what it allows."},
    {"name": "health", "description": "Probes for a supervisor, and metrics."},
]


def create_app(
    context: ServingContext,
    settings: Settings,
    build_engine: BuildEngine,
    *,
    load_encoder: LoadEncoder | None = None,
    onboarding: Onboarding | None = None,
    on_ready: Callable[[], None] = lambda: None,
    on_failed: Callable[[], None] = lambda: None,
    check_interval_s: float = 1.0,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application for one bundle. Its lifespan loads and stops the engine.

    While the engine loads, the server answers: /livez with 200, /readyz with 503. The runtime
    stands in ``app.state.runtime``.

    Args:
        context: what is served.
        settings: limits and the like.
        build_engine: makes the engine; runs in a thread.
        load_encoder: loads the tokenizer; needed if ``context`` has a search template.
        onboarding: versions and jobs; None: the base is served for ever, without admin routes.
        on_ready: called once when requests can be served.
        on_failed: called once when the engine could not start or has died.
        check_interval_s: seconds between looks at the engine's health.
        tracing: writes spans, for tests; None: as the settings say.

    Raises:
        AccessError: callers need keys, and there is none.
        KeysError: the keys file is damaged.
    """
    keyring, audit = open_keyring(settings), open_audit(settings)
    telemetry = Telemetry(tracing or open_tracing(settings.otlp_endpoint))
    runtime = Runtime(
        context,
        settings,
        build_engine,
        load_encoder=load_encoder,
        onboarding=onboarding,
        telemetry=telemetry,
        on_ready=on_ready,
        on_failed=on_failed,
        check_interval_s=check_interval_s,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        audit.start()
        await runtime.start()
        try:
            yield
        finally:
            await runtime.stop()
            await asyncio.to_thread(audit.stop)
            await asyncio.to_thread(telemetry.tracing.stop)

    app = create_api(lifespan=lifespan)
    app.state.runtime = runtime
    app.add_middleware(BodyLimitMiddleware, max_bytes=settings.max_body_bytes)
    app.add_middleware(OverloadDoor, runtime=runtime)
    app.add_middleware(
        AccessGate,
        routes=app.router.routes,
        settings=settings,
        keyring=keyring,
        limiter=open_limiter(settings),
        audit=audit,
    )
    if settings.cors_origins:
        # Outside the gate: a preflight carries no key, and a page must be able to read a refusal.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "PATCH", "DELETE"),
            allow_headers=(
                "Authorization",
                KEY_HEADER,
                "Content-Type",
                "Idempotency-Key",
                REQUEST_ID_HEADER,
            ),
            expose_headers=(
                "Location",
                "RateLimit",
                "RateLimit-Policy",
                "Retry-After",
                REQUEST_ID_HEADER,
            ),
        )
    app.add_middleware(DrainMiddleware, work=runtime.work)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RequestContextMiddleware)
    app.add_middleware(MetricsMiddleware, meters=telemetry.meters)
    app.add_middleware(telemetry.tracing.wrap)  # added last: outermost
    return app


def create_api(**options: Any) -> FastAPI:
    """Routes, error handlers and the OpenAPI document, with nothing behind them.

    Args:
        options: further arguments of `FastAPI`.
    """
    # FastAPI's own /docs page loads its scripts from elsewhere; this one serves them itself.
    app = FastAPIOffline(
        title=TITLE,
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=_TAGS,
        # An unknown spelling of a path gets 404, not a redirect built from the Host header.
        redirect_slashes=False,
        redoc_url=None,
        responses=problems("internal_error"),
        generate_unique_id_function=lambda route: route.name,
        static_url="/docs-static",
        **options,
    )
    for module in (
        recommendations,
        items,
        admin_items,
        admin_jobs,
        admin_versions,
        info,
        health,
        metrics,
    ):
        app.include_router(module.router)
    for exception in (
        ServiceError,
        EngineError,
        RefusedError,
        StoreError,
        RequestValidationError,
        HTTPException,
    ):
        app.add_exception_handler(exception, _answer)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def openapi_document() -> dict[str, Any]:
    """The OpenAPI document. The same for every bundle and setting."""
    return create_api().openapi()


async def _answer(request: Request, error: Exception) -> Response:
    if kind_of(error).status == 503 and isinstance(error, EngineError):
        logger.error("the engine could not answer: %s", error, exc_info=error.__cause__)
    if isinstance(error, StoreError):
        logger.error("%s", error)
    if isinstance(error, HTTPException) and error.status_code == 405:
        # The framework names the methods of the first route with this path only.
        allow = ", ".join(allowed_methods(request.app.router.routes, request.scope))
        error = HTTPException(405, headers={"Allow": allow})
    return problem_response(error, request.state.request_id, request.headers.get("content-type"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            tags=app.openapi_tags,
            routes=app.routes,
            license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
            servers=[{"url": "/", "description": "The service that serves this document."}],
        )
        schemas = document["components"]["schemas"]
        problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= problem.pop("$defs") | {"Problem": problem}
        document["components"]["schemas"] = dict(sorted(schemas.items()))
        secure(document, app.routes, problems)
        app.openapi_schema = document
    return app.openapi_schema
