"""From a request's body to its answer: checks, deadlines, batches, and where the time went."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from service.admission import OverloadError
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


class Batch:
    """Requests that came together. What was accepted is answered, also while the service stops.

    Args:
        runtime: the running service.
        recommender: its own, taken once.
        request_id: of the batch; each request's has its number behind.
    """

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
        """Answers or problems, in the order of the requests. Never raises for one's sake."""
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
        query = checked(body, self._runtime, request_id)
        # The request's own deadline counts from the arrival, the service's from its turn.
        async with _within(body.timeout_ms, self.arrived), self._gate.enter(query.beam_width):
            since = time.monotonic() if body.timeout_ms is None else self.arrived
            return await answer(body, query, self._runtime, self._recommender, since)


@asynccontextmanager
async def _within(timeout_ms: int | None, since: float) -> AsyncIterator[None]:
    """Raise DeadlineError once so many milliseconds are over."""
    left = None if not timeout_ms else since + timeout_ms / 1000 - time.monotonic()
    try:
        async with asyncio.timeout(left):
            yield
    except TimeoutError:
        raise DeadlineError(f"no answer within {timeout_ms} ms") from None


def checked(body: RecommendationRequest, runtime: Runtime, request_id: str) -> Query:
    """The query of a request that the service can answer.

    Raises:
        RequestInvalidError: as `to_query`.
        SearchUnavailableError: a search query to a model that was not trained for search.
    """
    query = to_query(body, runtime.settings, request_id)
    if body.query is not None and runtime.context.search is None:
        raise SearchUnavailableError(
            f"the model of bundle {runtime.context.name!r} was not trained for search: "
            "send a history instead of a query"
        )
    return query


async def answer(
    body: RecommendationRequest,
    query: Query,
    runtime: Runtime,
    recommender: Recommender,
    since: float,
) -> RecommendationResponse:
    """Answer one request.

    Args:
        body: the request.
        query: `checked` of it.
        runtime: the running service.
        recommender: its own.
        since: when its time began to run, by `time.monotonic`.

    Raises:
        DeadlineError: the request's time, or without one the service's, is over.
        VersionNotServedError, OverloadedError, UnknownItemsRefusedError, RequestInvalidError: see
            the table of problems.
        EngineError: as `Recommender.recommend`.
    """
    started = time.monotonic()
    timeout_ms = runtime.settings.timeout_ms if body.timeout_ms is None else body.timeout_ms
    if timeout_ms:
        query = replace(query, deadline=since + timeout_ms / 1000)
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
        found = await _recommend(recommender, query)
    return _response(runtime, found, query, started)


async def _recommend(recommender: Recommender, query: Query) -> Recommendation:
    try:
        return await recommender.recommend(query)
    except QueryUnreadableError as error:
        raise RequestInvalidError(("body", "query"), str(error)) from error
    except OverloadError as error:
        raise OverloadedError(str(error), error.retry_after_s) from error
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
    runtime: Runtime, found: Recommendation, query: Query, started: float
) -> RecommendationResponse:
    took_ms = ms_since(started)
    fallback = found.fallback_reason is not None
    items = [_item(one, rank) for rank, one in enumerate(found.items, start=1)]
    return RecommendationResponse(
        items=items,
        version=found.version,
        request_id=query.request_id,
        fallback=fallback,
        fallback_reason=found.fallback_reason,
        unknown_items=found.unknown_items,
        unknown_count=found.unknown_count,
        shortfall=query.k - len(found.items),
        beam_width=None if fallback else query.beam_width,
        took_ms=took_ms,
        timings=_timings(runtime, query, found, started),
    )


def _timings(runtime: Runtime, query: Query, found: Recommendation, started: float) -> Timings:
    """Where the time went, also told to metrics and traces."""
    engine = found.timings
    render_s = time.monotonic() - found.decoded
    total_s = time.monotonic() - started
    telemetry = runtime.telemetry
    telemetry.meters.answered(engine, render_s, total_s, found.fallback_reason)
    telemetry.tracing.recommended(
        engine,
        found.decoded,
        total_s,
        {
            "gti.version": found.version,
            "gti.beam_width": query.beam_width,
            "gti.items": len(found.items),
            "gti.fallback": found.fallback_reason is not None,
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


def ms_since(started: float) -> float:
    """Milliseconds since a moment of `time.monotonic`."""
    return round((time.monotonic() - started) * 1000, 3)
