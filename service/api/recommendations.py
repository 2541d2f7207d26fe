"""Recommendations."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from service.api.deps import RequestIdDep, RuntimeDep, problems, unless_disconnected
from service.errors import RequestInvalidError, SearchUnavailableError, VersionNotServedError
from service.recommender import Query, Recommendation, Recommender
from service.schemas import RecommendationRequest, RecommendationResponse, RecommendedItem
from service.search import QueryUnreadableError
from service.settings import Settings

router = APIRouter(prefix="/v1/recommendations", tags=["recommendations"])


@router.post(
    "",
    summary="Recommend items for a history, or find them for a query",
    responses=problems(
        "malformed_body",
        "body_too_large",
        "unsupported_media_type",
        "validation_failed",
        "prompt_too_long",
        "search_unavailable",
        "version_not_served",
        "not_ready",
        "engine_dead",
        "engine_error",
    ),
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
    if body.query is not None and runtime.context.search is None:
        raise SearchUnavailableError(
            f"the model of bundle {runtime.context.name!r} was not trained for search: "
            "send a history instead of a query"
        )
    query = to_query(body, runtime.settings, request_id)
    recommender = runtime.recommender()
    if body.min_version is not None:
        served = await unless_disconnected(request, runtime.wait_for_version(body.min_version))
        if served < body.min_version:
            raise VersionNotServedError(
                f"version {served} is served, not yet {body.min_version}",
                extra={"version": served},
            )
    started = time.perf_counter()
    answer = await unless_disconnected(request, _answer(recommender, query))
    fallback = answer.fallback_reason is not None
    return RecommendationResponse(
        items=[
            RecommendedItem(
                item_id=found.item.item_id,
                title=found.item.title,
                score=found.score,
                rank=rank,
                semantic_id=list(found.item.sid),
            )
            for rank, found in enumerate(answer.items, start=1)
        ],
        version=answer.version,
        request_id=request_id,
        fallback=fallback,
        fallback_reason=answer.fallback_reason,
        unknown_items=answer.unknown_items,
        unknown_count=answer.unknown_count,
        shortfall=query.k - len(answer.items),
        beam_width=None if fallback else query.beam_width,
        took_ms=round((time.perf_counter() - started) * 1000, 3),
    )


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
    if body.k > settings.max_k:
        raise RequestInvalidError(("body", "k"), f"at most {settings.max_k}")
    beam_width = body.beam_width
    if beam_width is None:
        beam_width = max(settings.default_beam_width, body.k)
    elif beam_width > settings.max_beam_width:
        raise RequestInvalidError(("body", "beam_width"), f"at most {settings.max_beam_width}")
    elif beam_width < body.k:
        raise RequestInvalidError(("body", "beam_width"), f"at least k, which is {body.k}")
    return Query(history, body.k, beam_width, body.exclude_history, request_id, body.query)


async def _answer(recommender: Recommender, query: Query) -> Recommendation:
    try:
        return await recommender.recommend(query)
    except QueryUnreadableError as error:
        raise RequestInvalidError(("body", "query"), str(error)) from error
