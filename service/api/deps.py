"""What the routers share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request

from service.errors import BY_CODE, MEDIA_TYPE, ClientClosedError, problem
from service.runtime import Runtime

_T = TypeVar("_T")


def _runtime(request: Request) -> Runtime:
    return cast(Runtime, request.app.state.runtime)


def _request_id(request: Request) -> str:
    return cast(str, request.state.request_id)


RuntimeDep = Annotated[Runtime, Depends(_runtime)]
RequestIdDep = Annotated[str, Depends(_request_id)]


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
    "not_ready": {
        "detail": "merging the backbone with the bundle",
        "extra": {"state": "starting"},
    },
}
