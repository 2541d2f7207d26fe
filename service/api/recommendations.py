"""Recommendations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request

from service.api.deps import RequestIdDep, RuntimeDep, problems, unless_disconnected
from service.errors import (
    DeadlineError,
    RequestInvalidError,
    SearchUnavailableError,
    UnknownItemsRefusedError,
    VersionNotServedError,
)
from service.problems import as_problem
from service.recommender import Query, Ranked, Recommendation, Recommender, UnknownItemsError
from service.runtime import Runtime
from service.schemas import Problem
from service.schemas_recommendations import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    Explanation,
    RecommendationRequest,
    RecommendationResponse,
    RecommendedItem,
)
from service.search import QueryUnreadableError
from service.settings import Settings
from service.slate import Cap

logger = logging.getLogger(__name__)

MAX_LISTED_UNKNOWN = 100
CAP_CHOICE = 3
"""Times ``k`` that a search with a diversity cap looks for, unless a beam width is given."""

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
    return await unless_disconnected(request, _answer(body, runtime, request_id))


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

    Each answer names its version: while items are onboarded, two may differ.
    """
    if len(body.requests) > runtime.settings.max_batch:
        raise RequestInvalidError(
            ("body", "requests"), f"at most {runtime.settings.max_batch} requests"
        )
    runtime.recommender()
    started = time.perf_counter()
    results = await unless_disconnected(
        request,
        _together(
            [
                _result(one, runtime, f"{request_id}-{number}")
                for number, one in enumerate(body.requests)
            ]
        ),
    )
    return BatchResponse(results=results, request_id=request_id, took_ms=_ms_since(started))


async def _together(work: Sequence[Coroutine[Any, Any, BatchResult]]) -> list[BatchResult]:
    # A group, so that giving up one is giving up all.
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]


async def _result(body: RecommendationRequest, runtime: Runtime, request_id: str) -> BatchResult:
    try:
        return BatchResult(status=200, answer=await _answer(body, runtime, request_id))
    except Exception as error:
        document, _ = as_problem(error, request_id)
        if document["status"] >= 500:
            logger.exception("request %s of a batch failed", request_id)
        return BatchResult(status=document["status"], problem=Problem(**document))


async def _answer(
    body: RecommendationRequest, runtime: Runtime, request_id: str
) -> RecommendationResponse:
    query = to_query(body, runtime.settings, request_id)
    if body.query is not None and runtime.context.search is None:
        raise SearchUnavailableError(
            f"the model of bundle {runtime.context.name!r} was not trained for search: "
            "send a history instead of a query"
        )
    started = time.perf_counter()
    try:
        async with asyncio.timeout(None if body.timeout_ms is None else body.timeout_ms / 1000):
            recommender = runtime.recommender()
            if body.min_version is not None:
                # Longer than the deadline, which is then what ends the wait.
                wait_s = None if body.timeout_ms is None else body.timeout_ms / 1000 + 1
                served = await runtime.wait_for_version(body.min_version, wait_s)
                if served < body.min_version:
                    raise VersionNotServedError(
                        f"version {served} is served, not yet {body.min_version}",
                        extra={"version": served},
                    )
            answer = await _recommend(recommender, query)
    except TimeoutError:
        raise DeadlineError(f"no answer within {body.timeout_ms} ms") from None
    return _response(answer, query, request_id, _ms_since(started))


async def _recommend(recommender: Recommender, query: Query) -> Recommendation:
    try:
        return await recommender.recommend(query)
    except QueryUnreadableError as error:
        raise RequestInvalidError(("body", "query"), str(error)) from error
    except UnknownItemsError as error:
        raise UnknownItemsRefusedError(
            f"{len(error.ids)} of the request's ids are not in the catalogue",
            extra={"unknown_items": error.ids[:MAX_LISTED_UNKNOWN]},
        ) from error


def to_query(body: RecommendationRequest, settings: Settings, request_id: str) -> Query:
    """A query within the settings' limits.

    Raises:
        RequestInvalidError: a value is above its limit, or the beam is narrower than ``k``.
    """
    history = body.history or []
    if len(history) > settings.max_history:
        raise RequestInvalidError(
            ("body", "history"),
            f"{len(history)} entries, at most {settings.max_history}: send the latest ones",
        )
    for name, ids in (("include_items", body.include_items), ("exclude_items", body.exclude_items)):
        if ids is not None and len(ids) > settings.max_listed:
            raise RequestInvalidError(
                ("body", name), f"{len(ids)} entries, at most {settings.max_listed}"
            )
    if body.k > settings.max_k:
        raise RequestInvalidError(("body", "k"), f"at most {settings.max_k}")
    cap = None if body.diversity is None else Cap(body.diversity.attribute, body.diversity.most)
    beam_width = body.beam_width
    if beam_width is None:
        wanted = body.k if cap is None else CAP_CHOICE * body.k
        beam_width = max(settings.default_beam_width, body.k, min(wanted, settings.max_beam_width))
    elif beam_width > settings.max_beam_width:
        raise RequestInvalidError(("body", "beam_width"), f"at most {settings.max_beam_width}")
    elif beam_width < body.k:
        raise RequestInvalidError(("body", "beam_width"), f"at least k, which is {body.k}")
    return Query(
        history,
        body.k,
        beam_width,
        body.exclude_history,
        request_id,
        body.query,
        include=body.include_items,
        exclude=body.exclude_items,
        conditions=tuple(one.condition() for one in body.filters),
        cap=cap,
        explain=body.explain and body.query is None,
        strict=body.strict,
    )


def _response(
    answer: Recommendation, query: Query, request_id: str, took_ms: float
) -> RecommendationResponse:
    fallback = answer.fallback_reason is not None
    return RecommendationResponse(
        items=[_item(found, rank) for rank, found in enumerate(answer.items, start=1)],
        version=answer.version,
        request_id=request_id,
        fallback=fallback,
        fallback_reason=answer.fallback_reason,
        unknown_items=answer.unknown_items,
        unknown_count=answer.unknown_count,
        shortfall=query.k - len(answer.items),
        beam_width=None if fallback else query.beam_width,
        took_ms=took_ms,
    )


def _item(found: Ranked, rank: int) -> RecommendedItem:
    explanation = None
    if found.nearest is not None:
        near = found.nearest.item
        explanation = Explanation(
            nearest_item=None if near is None else near.item_id,
            shared_levels=found.nearest.shared_levels,
        )
    return RecommendedItem(
        item_id=found.item.item_id,
        title=found.item.title,
        score=found.score,
        rank=rank,
        semantic_id=list(found.item.sid),
        explanation=explanation,
    )


def _ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1000, 3)
