"""New items, and changes of items."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response

from service.api.deps import AdminDep, AuditDep, problems, unless_disconnected
from service.schemas_admin import ItemChange, ItemChanged, JobResponse, OnboardRequest
from service.store.submission import Submission

router = APIRouter(prefix="/v1/admin/items", tags=["admin"])

ADMIN_PROBLEMS = ("admin_disabled", "not_ready", "engine_dead", "store_unavailable")
BODY_PROBLEMS = ("malformed_body", "body_too_large", "unsupported_media_type", "validation_failed")

_ENDED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The job has ended.", "model": JobResponse}
}

ItemIdPath = Annotated[str, Path(min_length=1, max_length=256, description="The item's id.")]


@router.post(
    "",
    status_code=202,
    summary="Onboard new items",
    responses=_ENDED
    | problems(
        *BODY_PROBLEMS,
        "item_conflict",
        "idempotency_conflict",
        "reserve_exhausted",
        *ADMIN_PROBLEMS,
    ),
)
async def onboard_items(
    request: Request,
    response: Response,
    body: OnboardRequest,
    admin: AdminDep,
    audit: AuditDep,
    wait: Annotated[
        float, Query(ge=0, le=60, description="Seconds to wait for the job's end.")
    ] = 0,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1,
            max_length=255,
            description="Makes a repeated request safe: the same key and body, the same job.",
        ),
    ] = None,
) -> JobResponse:
    """Accept 1 to 1,000 items; a job takes them from text to served. Those that
    the gate lets through are published together; the others stand in the job with their reasons.

    An item with a known id and the same content is no new work. Answers at once with 202 and the
    job's address in `Location`, or with 200 when the job has ended within `wait` seconds.
    """
    items = tuple(item.text() for item in body.items)
    audit["item_count"] = len(items)
    job, _ = await admin.submit(Submission(items, body.replace, idempotency_key))
    audit["job_id"] = job.job_id
    if wait and not job.ended:
        job = await unless_disconnected(request, admin.wait(job, wait))
    if job.version is not None:
        audit["version"] = job.version
    response.headers["Location"] = f"/v1/admin/jobs/{job.job_id}"
    response.status_code = 200 if job.ended else 202
    return JobResponse.of(job)


@router.patch(
    "/{item_id:path}",
    summary="Change an item",
    responses=problems(*BODY_PROBLEMS, "item_not_found", "engine_error", *ADMIN_PROBLEMS),
)
async def change_item(
    item_id: ItemIdPath, body: ItemChange, admin: AdminDep, audit: AuditDep
) -> ItemChanged:
    """Take an item out of service or back, or give it other attributes.

    In force from the next request on. Nothing to change makes no new version.
    """
    changed = await admin.change(item_id, available=body.available, attributes=body.attributes)
    audit["version"] = changed.version
    return ItemChanged(
        item_id=changed.item_id, version=changed.version, available=changed.available
    )


@router.delete(
    "/{item_id:path}",
    summary="Retire an item",
    responses=problems("validation_failed", "item_not_found", "engine_error", *ADMIN_PROBLEMS),
)
async def retire_item(item_id: ItemIdPath, admin: AdminDep, audit: AuditDep) -> ItemChanged:
    """Take an item out of service: no answer has it from the next request on.

    Histories may still hold it. Its semantic ID stays its own, so that PATCH brings it back.
    """
    changed = await admin.change(item_id, available=False)
    audit["version"] = changed.version
    return ItemChanged(
        item_id=changed.item_id, version=changed.version, available=changed.available
    )
