"""What the routers share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Query, Request

from gti_core.types import JsonDict
from service.errors import ClientClosedError
from service.onboarding.admin import Admin
from service.problems import BY_CODE, MEDIA_TYPE, problem
from service.runtime import Runtime

_T = TypeVar("_T")


def _runtime(request: Request) -> Runtime:
    return cast(Runtime, request.app.state.runtime)


def _admin(runtime: Annotated[Runtime, Depends(_runtime)]) -> Admin:
    return runtime.admin()


def _audit(request: Request) -> JsonDict:
    return cast(JsonDict, request.state.audit)


def _request_id(request: Request) -> str:
    return cast(str, request.state.request_id)


RuntimeDep = Annotated[Runtime, Depends(_runtime)]
AdminDep = Annotated[Admin, Depends(_admin)]
AuditDep = Annotated[JsonDict, Depends(_audit)]
"""Facts for the request's entry in the audit log; a route adds what it knows."""
RequestIdDep = Annotated[str, Depends(_request_id)]
LimitQuery = Annotated[int, Query(ge=1, le=500, description="Most entries of the page.")]
CursorQuery = Annotated[
    str | None,
    Query(pattern="^[0-9]{1,9}$", description="`next_cursor` of the page before."),
]


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await ``work``, but cancel it when the client goes away.

    Call it when the request's body has been read: what comes next can only be the disconnect.

    Raises:
        ClientClosedError: the client went away first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientClosedError("the client closed the connection")
    finally:
        watcher.cancel()
        task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def problems(*codes: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for error codes, grouped by status, with an example each."""
    responses: dict[int | str, dict[str, Any]] = {}
    for code in codes:
        kind = BY_CODE[code]
        response = responses.setdefault(
            kind.status,
            {
                "description": kind.title,
                "content": {
                    MEDIA_TYPE: {
                        "schema": {"$ref": "#/components/schemas/Problem"},
                        "examples": {},
                    }
                },
            },
        )
        if kind.title not in response["description"]:
            response["description"] += f"; {kind.title[0].lower()}{kind.title[1:]}"
        example = {"detail": kind.meaning} | _EXAMPLES.get(code, {})
        response["content"][MEDIA_TYPE]["examples"][code] = {
            "value": problem(
                kind,
                example["detail"],
                "3f2a0c9e1b7d4c55a1e0b2f6d9c8e7a4",
                errors=example.get("errors", ()),
                extra=example.get("extra"),
            )
        }
    return responses


_EXAMPLES: dict[str, dict[str, Any]] = {
    "malformed_body": {"detail": "at character 12: Expecting value"},
    "item_not_found": {"detail": "no item 'tt0000000' in the catalogue"},
    "body_too_large": {"detail": "the body is larger than 1048576 bytes"},
    "validation_failed": {
        "detail": "body.k: at most 200",
        "errors": [{"loc": ["body", "k"], "msg": "at most 200"}],
    },
    "unauthorized": {"detail": "the key is not valid"},
    "forbidden_scope": {"detail": "the key's scope is read; this route needs admin"},
    "rate_limited": {"detail": "too many requests: the next one may come in 1 s"},
    "admin_disabled": {"detail": "the service runs with --no-admin"},
    "item_conflict": {
        "detail": "'n-1' stands in the catalogue with other content, or out of service: send "
        '"replace": true for a new semantic ID, or PATCH the item'
    },
    "idempotency_conflict": {"detail": "Idempotency-Key 'import-7' was used with another body"},
    "reserve_exhausted": {"detail": "300 items need as many reserved codes, 256 are left"},
    "job_not_found": {"detail": "there is no job 0f6d2c9a51b84e7799a3c4d1e2f30b68"},
    "job_not_cancellable": {"detail": "job 0f6d2c9a51b84e7799a3c4d1e2f30b68 is publishing"},
    "version_not_found": {"detail": "there is no version 12"},
    "version_not_served": {
        "detail": "version 6 is served, not yet 7",
        "extra": {"version": 6},
    },
    "not_ready": {
        "detail": "merging the backbone with the bundle",
        "extra": {"state": "starting"},
    },
}
