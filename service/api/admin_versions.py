"""Versions of the catalogue: what there is, and going back or forward."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from service.api.admin_items import ADMIN_PROBLEMS
from service.api.deps import AdminDep, CursorQuery, LimitQuery, problems
from service.schemas_admin import VersionPage, VersionResponse

router = APIRouter(prefix="/v1/admin/versions", tags=["admin"])

NumberPath = Annotated[int, Path(ge=1, le=2**31 - 1, description="The version's number.")]


@router.get(
    "", summary="Versions, latest first", responses=problems("validation_failed", *ADMIN_PROBLEMS)
)
async def list_versions(
    admin: AdminDep, limit: LimitQuery = 50, cursor: CursorQuery = None
) -> VersionPage:
    """One page of versions."""
    records = await admin.versions(limit + 1, None if cursor is None else int(cursor))
    more = len(records) > limit
    return VersionPage(
        versions=[VersionResponse.of(record) for record in records[:limit]],
        next_cursor=str(records[limit - 1].number) if more else None,
    )


@router.post(
    "/{number}/activate",
    summary="Serve another version",
    responses=problems("validation_failed", "version_not_found", "engine_error", *ADMIN_PROBLEMS),
)
async def activate_version(number: NumberPath, admin: AdminDep) -> VersionResponse:
    """Roll back to a version, or go forward again. Served when the answer comes."""
    return VersionResponse.of(await admin.activate(number))
