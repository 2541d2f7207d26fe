"""Liveness and readiness."""

from __future__ import annotations

from fastapi import APIRouter

from service.api.deps import RuntimeDep, problems
from service.schemas import LiveResponse, ReadyResponse

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
    """200 when recommendations are served; 503 while loading, stopping or without an engine."""
    return ReadyResponse(status="ok", state="ready", version=await runtime.check())
