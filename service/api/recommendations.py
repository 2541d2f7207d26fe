"""Recommendations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request

from service.admission import OverloadError
from service.api.deps import RequestIdDep, RuntimeDep, problems, unless_disconnected
from service.engine.beam_gate import BeamGate
from service.errors import (
    DeadlineError,
    OverloadedError,
    RequestInvalidError,
    SearchUnavailableError,
    ServiceError,
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
    Timings,
)
from service.search import QueryUnreadableError
from service.settings import Settings
from service.slate import Cap

logger = logging.getLogger(__name__)

MAX_LISTED_UNKNOWN = 100
BATCH_PARTS = 4
"""A batch has at most this part of the beams that may be under way."""
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
    answer = await unless_disconnected(request, _answer(body, runtime, request_id))
    request.state.version = answer.version
    return answer


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
    batch = _Batch(runtime, runtime.recommender(), request_id)
    results = await unless_disconnected(request, batch.answers(body.requests))
    return BatchResponse(results=results, request_id=request_id, took_ms=_ms_since(batch.arrived))


class _Batch:
    """Requests that came together. What was accepted is answered, also while the service stops."""

    def __init__(self, runtime: Runtime, recommender: Recommender, request_id: str) -> None:
        self.arrived = time.monotonic()
        self._runtime = runtime
        self._recommender = recommender
        self._request_id = request_id
        # No more than is let in whatever the speed, so that a batch alone is never refused in part.
        settings = runtime.settings
        self._gate = BeamGate(
            max(1, min(settings.max_beam_width, settings.max_queued_beams // BATCH_PARTS))
        )

    async def answers(self, bodies: Sequence[RecommendationRequest]) -> list[BatchResult]:
        # A group, so that giving up one is giving up all.
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._result(body, f"{self._request_id}-{number}"))
                for number, body in enumerate(bodies)
            ]
        return [task.result() for task in tasks]

    async def _result(self, body: RecommendationRequest, request_id: str) -> BatchResult:
        try:
            return BatchResult(status=200, answer=await self._in_turn(body, request_id))
        except Exception as error:
            document, _ = as_problem(error, request_id)
            self._runtime.telemetry.meters.problem(document["code"])
            # A deadline that is over, or a service that stops, is told to the caller and no fault.
            if document["status"] >= 500 and not isinstance(error, ServiceError):
                logger.exception("request %s of a batch failed", request_id)
            return BatchResult(status=document["status"], problem=Problem(**document))

    async def _in_turn(
        self, body: RecommendationRequest, request_id: str
    ) -> RecommendationResponse:
        beams = to_query(body, self._runtime.settings, request_id).beam_width
        async with _within(body.timeout_ms, self.arrived), self._gate.enter(beams):
            given_ms = body.timeout_ms
            since = time.monotonic() if given_ms is None else self.arrived
            return await _answer(body, self._runtime, request_id, self._recommender, since)


@asynccontextmanager
async def _within(timeout_ms: int | None, since: float) -> AsyncIterator[None]:
    """Raise DeadlineError once so many milliseconds are over."""
    left = None if not timeout_ms else since + timeout_ms / 1000 - time.monotonic()
    try:
        async with asyncio.timeout(left):
            yield
    except TimeoutError:
        raise DeadlineError(f"no answer within {timeout_ms} ms") from None


async def _answer(
    body: RecommendationRequest,
    runtime: Runtime,
    request_id: str,
    recommender: Recommender | None = None,
    since: float | None = None,
) -> RecommendationResponse:
    started = time.monotonic()
    since = started if since is None else since
    timeout_ms = runtime.settings.timeout_ms if body.timeout_ms is None else body.timeout_ms
    deadline = since + timeout_ms / 1000 if timeout_ms else None
    query = to_query(body, runtime.settings, request_id, deadline)
    if body.query is not None and runtime.context.search is None:
        raise SearchUnavailableError(
            f"the model of bundle {runtime.context.name!r} was not trained for search: "
            "send a history instead of a query"
        )
    recommender = recommender or runtime.recommender()
    async with _within(timeout_ms, since):
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
    return _response(runtime, answer, query, request_id, started)


async def _recommend(recommender: Recommender, query: Query) -> Recommendation:
    try:
        return await recommender.recommend(query)
    except QueryUnreadableError as error:
        raise RequestInvalidError(("body", "query"), str(error)) from error
    except OverloadError as error:
        raise OverloadedError(
            str(error), headers={"Retry-After": str(error.retry_after_s)}
        ) from error
    except UnknownItemsError as error:
        raise UnknownItemsRefusedError(
            f"{len(error.ids)} of the request's ids are not in the catalogue",
            extra={"unknown_items": error.ids[:MAX_LISTED_UNKNOWN]},
        ) from error


def to_query(
    body: RecommendationRequest,
    settings: Settings,
    request_id: str,
    deadline: float | None = None,
) -> Query:
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
        deadline=deadline,
    )


def _response(
    runtime: Runtime, answer: Recommendation, query: Query, request_id: str, started: float
) -> RecommendationResponse:
    took_ms = _ms_since(started)
    fallback = answer.fallback_reason is not None
    items = [_item(found, rank) for rank, found in enumerate(answer.items, start=1)]
    return RecommendationResponse(
        items=items,
        version=answer.version,
        request_id=request_id,
        fallback=fallback,
        fallback_reason=answer.fallback_reason,
        unknown_items=answer.unknown_items,
        unknown_count=answer.unknown_count,
        shortfall=query.k - len(answer.items),
        beam_width=None if fallback else query.beam_width,
        took_ms=took_ms,
        timings=_timings(runtime, query, answer, started),
    )


def _timings(runtime: Runtime, query: Query, answer: Recommendation, started: float) -> Timings:
    """Where the time went, also told to metrics and traces."""
    engine = answer.timings
    render_s = time.monotonic() - answer.decoded
    total_s = time.monotonic() - started
    telemetry = runtime.telemetry
    telemetry.meters.answered(engine, render_s, total_s, answer.fallback_reason)
    telemetry.tracing.recommended(
        engine,
        answer.decoded,
        total_s,
        {
            "gti.version": answer.version,
            "gti.beam_width": query.beam_width,
            "gti.items": len(answer.items),
            "gti.fallback": answer.fallback_reason is not None,
        },
    )
    return Timings(
        queue_ms=_ms(None if engine is None else engine.queue_s),
        prefill_ms=_ms(None if engine is None else engine.prefill_s),
        beams_ms=_ms(None if engine is None else engine.beams_s),
        render_ms=round(render_s * 1000, 3),
        total_ms=round(total_s * 1000, 3),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


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
    return round((time.monotonic() - started) * 1000, 3)
