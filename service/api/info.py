"""What runs here."""

from __future__ import annotations

from fastapi import APIRouter

from service import __version__
from service.api.deps import RuntimeDep
from service.runtime import Runtime
from service.schemas import BundleInfo, CatalogInfo, InfoResponse, LimitsInfo, WorkersInfo
from service.store.errors import StoreError

router = APIRouter(prefix="/v1/info", tags=["info"])


@router.get("", summary="Versions, bundle, engine and limits")
async def info(runtime: RuntimeDep) -> InfoResponse:
    """Facts for people and for clients that want to know the limits. Always answers."""
    context, settings, engine = runtime.context, runtime.settings, runtime.engine
    served = runtime.served
    vocabulary = served.vocabulary
    return InfoResponse(
        name="gti-serve",
        service_version=__version__,
        state=runtime.state.value,
        version=None if engine is None else engine.model.version,
        bundle=BundleInfo(name=context.name, digest=context.digest),
        search=context.search is not None,
        engine=None if engine is None else {"name": engine.name} | engine.info(),
        catalog=CatalogInfo(
            items=served.index.base.total,
            levels=vocabulary.levels,
            active_codes=list(vocabulary.active),
            reserved_codes=[vocabulary.reserved(level) for level in range(vocabulary.levels)],
            codes_left=await _codes_left(runtime),
        ),
        workers=await _workers(runtime),
        limits=LimitsInfo(
            max_k=settings.max_k,
            default_beam_width=settings.default_beam_width,
            max_beam_width=settings.max_beam_width,
            max_history=settings.max_history,
            max_listed=settings.max_listed,
            max_batch=settings.max_batch,
            prompt_history=context.prompt.max_history,
            max_body_bytes=settings.max_body_bytes,
            max_queued_beams=settings.max_queued_beams,
            max_queued_tokens=settings.max_queued_tokens,
            timeout_ms=settings.timeout_ms,
        ),
    )


async def _codes_left(runtime: Runtime) -> int | None:
    try:
        return await runtime.codes_left()
    except StoreError:
        return None


async def _workers(runtime: Runtime) -> WorkersInfo | None:
    try:
        found = await runtime.workers()
    except StoreError:
        return None
    return WorkersInfo(ready=found.ready, starting=found.starting)
