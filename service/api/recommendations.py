"""Recommendations."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from service.answers import Batch, answer, checked, ms_since
from service.api.deps import RequestIdDep, RuntimeDep, problems, unless_disconnected
from service.errors import RequestInvalidError
from service.schemas_recommendations import (
    BatchRequest,
    BatchResponse,
    RecommendationRequest,
    RecommendationResponse,
)

router = APIRouter(prefix="/v1/recommendations", tags=["recommendations"])


_PROBLEMS = (
    "malformed_body",
    "body_too_large",
    "unsupported_media_type",
    "validation_failed",
    "prompt_too_long",
    "unknown_items",
    "search_unavailable",
    "version_not_served",
    "not_ready",
    "engine_dead",
    "engine_error",
    "overloaded",
    "deadline_exceeded",
)


@router.post(
    "",
    summary="Recommend items for a history, or find them for a query",
    responses=problems(*_PROBLEMS),
)
async def recommend(
    request: Request,
    body: RecommendationRequest,
    runtime: RuntimeDep,
    request_id: RequestIdDep,
) -> RecommendationResponse:
    """The `k` items the model finds most likely next after a history, or for a search query.

    Send exactly one of `history` and `query`. Every item exists in the catalogue.

    Exactly `k` items come back while `k` items are admissible; else `shortfall` says how many
    are missing. An empty history, or one with no known item, gets the most popular items and
    `fallback: true`.
    """
    query = checked(body, runtime, request_id)
    recommender = runtime.recommender()
    found = await unless_disconnected(
        request, answer(body, query, runtime, recommender, time.monotonic())
    )
    request.state.version = found.version
    return found


@router.post(
    ":batch",
    summary="Several requests at once",
    responses=problems(
        "malformed_body",
        "body_too_large",
        "unsupported_media_type",
        "validation_failed",
        "not_ready",
        "engine_dead",
    ),
)
async def recommend_batch(
    request: Request, body: BatchRequest, runtime: RuntimeDep, request_id: RequestIdDep
) -> BatchResponse:
    """Answers in the requests' order. One that fails has a problem and leaves the others alone.

    Each answer names its version: while items are onboarded, two may differ. Not all run at once:
    a batch leaves room for other callers, and a request's own deadline counts from the arrival.
    """
    if len(body.requests) > runtime.settings.max_batch:
        raise RequestInvalidError(
            ("body", "requests"), f"at most {runtime.settings.max_batch} requests"
        )
    batch = Batch(runtime, runtime.recommender(), request_id)
    results = await unless_disconnected(request, batch.answers(body.requests))
    return BatchResponse(results=results, request_id=request_id, took_ms=ms_since(batch.arrived))
