"""Metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from service.api.deps import RuntimeDep

router = APIRouter(tags=["health"])

_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus text, or OpenMetrics where `Accept` asks for it.",
        "content": {
            "text/plain": {
                "schema": {"type": "string"},
                "example": "# TYPE gti_engine_up gauge\ngti_engine_up 1.0\n",
            }
        },
    }
}


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    response_class=PlainTextResponse,
    responses=_ANSWER,
)
async def metrics(request: Request, runtime: RuntimeDep) -> Response:
    """Everything that is counted; docs/operations.md says what each means. Always answers."""
    body, content_type = await runtime.telemetry.scrape(
        await runtime.facts(), request.headers.get("accept", "")
    )
    return Response(body, headers={"Content-Type": content_type})
