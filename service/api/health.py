"""Liveness and readiness."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.deps import RuntimeDep, problems
from service.schemas import LiveResponse, ReadyResponse, StartedResponse

router = APIRouter(tags=["health"])


@router.get("/livez", summary="Is the process alive?")
async def livez() -> LiveResponse:
    """200 as long as the process answers. Asks nothing of the engine."""
    return LiveResponse(status="ok")


@router.get(
    "/readyz",
    summary="Can it serve requests?",
    responses=problems("not_ready", "engine_dead"),
)
async def readyz(runtime: RuntimeDep) -> ReadyResponse:
    """200 when recommendations are served; 503 while loading, stopping or without an engine.

    Answers at once: the engine is looked at every second, in the background.
    """
    return ReadyResponse(status="ok", state="ready", version=runtime.ready_version())


@router.get(
    "/startupz",
    summary="Has it started?",
    responses=problems("not_ready", "engine_dead"),
)
async def startupz(runtime: RuntimeDep) -> StartedResponse:
    """200 once the engine has been loaded, for as long as the process lives; 503 until then."""
    runtime.require_started()
    return StartedResponse(status="ok")
