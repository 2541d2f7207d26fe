"""Onboarding jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.convertors import StringConvertor, register_url_convertor

from service.api.admin_items import ADMIN_PROBLEMS
from service.api.deps import AdminDep, CursorQuery, LimitQuery, problems
from service.schemas_admin import JobPage, JobResponse, JobState, JobSummary

router = APIRouter(prefix="/v1/admin/jobs", tags=["admin"])


class _JobIdConvertor(StringConvertor):
    # So that GET of /{job_id}:cancel is a method that the path doesn't have, not a bad id.
    regex = "[^/:]+"


register_url_convertor("id", _JobIdConvertor())

JobIdPath = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The job's id.")]


@router.get(
    "", summary="Jobs, latest first", responses=problems("validation_failed", *ADMIN_PROBLEMS)
)
async def list_jobs(
    admin: AdminDep,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    limit: LimitQuery = 50,
    cursor: CursorQuery = None,
) -> JobPage:
    """One page of jobs, without their items."""
    jobs = await admin.jobs(limit + 1, state, None if cursor is None else int(cursor))
    more = len(jobs) > limit
    return JobPage(
        jobs=[JobSummary.of(job) for job in jobs[:limit]],
        next_cursor=str(jobs[limit - 1].seq) if more else None,
    )


@router.get(
    "/{job_id:id}",
    summary="One job",
    responses=problems("validation_failed", "job_not_found", *ADMIN_PROBLEMS),
)
async def get_job(job_id: JobIdPath, admin: AdminDep) -> JobResponse:
    """State, progress, and what the gate said of every item."""
    return JobResponse.of(await admin.job(job_id))


@router.post(
    "/{job_id:id}:cancel",
    summary="Cancel a job",
    responses=problems(
        "validation_failed", "job_not_found", "job_not_cancellable", *ADMIN_PROBLEMS
    ),
)
async def cancel_job(job_id: JobIdPath, admin: AdminDep) -> JobResponse:
    """Give a job up that is not being published. Nothing of it is served; its codes are free."""
    return JobResponse.of(await admin.cancel(job_id))
