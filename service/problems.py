"""Problem documents (RFC 9457): what an exception looks like to a client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gti_core.types import JsonDict
from service.engine.base import PromptTooLongError
from service.errors import (
    MalformedBodyError,
    ServiceError,
    UnsupportedMediaTypeError,
)
from service.faults import plain_words
from service.problem_table import TABLE, ProblemKind
from service.store import errors as store

MEDIA_TYPE = "application/problem+json"
MAX_LISTED_ERRORS = 20
"""A body can hold a fault per entry; the answer lists this many and says how many there are."""

_MAX_TEXT = 200

BY_CODE: dict[str, ProblemKind] = {kind.code: kind for kind in TABLE}
INTERNAL = BY_CODE["internal_error"]
_BY_EXCEPTION = {cls: kind for kind in TABLE for cls in kind.exceptions}
_BY_STATUS = {
    kind.status: kind for kind in (BY_CODE[c] for c in ("not_found", "method_not_allowed"))
}


def kind_of(error: BaseException) -> ProblemKind:
    """The table's row for an exception; the nearest base class wins."""
    if isinstance(error, HTTPException):
        return _BY_STATUS.get(error.status_code, INTERNAL)
    for cls in type(error).__mro__:
        if cls in _BY_EXCEPTION:
            return _BY_EXCEPTION[cls]
    return INTERNAL


def translate(error: BaseException, content_type: str | None) -> BaseException:
    """Turn the framework's exceptions for unreadable bodies into this module's.

    Args:
        error: what was raised.
        content_type: the request's Content-Type header.
    """
    if isinstance(error, HTTPException) and error.status_code == 400:
        # The framework's one use of 400: reading the body failed (encoding, depth, digits).
        return MalformedBodyError("the body is not JSON text in UTF-8 that can be read")
    if isinstance(error, RequestValidationError):
        for fault in error.errors():
            if fault["type"] == "json_invalid":
                reason = fault.get("ctx", {}).get("error", "it can't be read")
                return MalformedBodyError(f"at character {fault['loc'][-1]}: {_cut(reason)}")
            if tuple(fault["loc"]) == ("body",) and fault["type"] != "missing":
                media = (content_type or "").partition(";")[0].strip().lower()
                if media != "application/json" and not media.endswith("+json"):
                    return UnsupportedMediaTypeError(
                        "send the body with the header Content-Type: application/json"
                    )
    return error


def problem(
    kind: ProblemKind,
    detail: str,
    request_id: str,
    *,
    errors: Sequence[JsonDict] = (),
    extra: Mapping[str, Any] | None = None,
) -> JsonDict:
    """A problem document (RFC 9457)."""
    document: JsonDict = {
        "type": f"urn:gti-serve:error:{kind.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": detail,
        "code": kind.code,
        "request_id": request_id,
    }
    if errors:
        document["errors"] = list(errors)
    return document | dict(extra or {})


def as_problem(
    error: BaseException, request_id: str, content_type: str | None = None
) -> tuple[JsonDict, Mapping[str, str] | None]:
    """The problem document of an exception, and headers for it. What the table doesn't know says
    nothing of its cause."""
    error = translate(error, content_type)
    kind = kind_of(error)
    errors: list[JsonDict] = []
    headers: Mapping[str, str] | None = None
    extra: JsonDict = {}
    if isinstance(error, ServiceError):
        detail, errors, headers, extra = error.detail, error.errors, error.headers, error.extra
    elif isinstance(error, RequestValidationError):
        faults = error.errors()
        errors = [
            {"loc": [_cut(part) for part in fault["loc"]], "msg": _cut(plain_words(fault))}
            for fault in faults[:MAX_LISTED_ERRORS]
        ]
        detail = f"{'.'.join(str(part) for part in errors[0]['loc'])}: {errors[0]['msg']}"
        if len(faults) > 1:
            detail += f" (and {len(faults) - 1} more)"
    elif isinstance(error, HTTPException):
        detail, headers = kind.meaning, error.headers
    elif isinstance(error, PromptTooLongError | store.RefusedError):
        detail = str(error) or kind.meaning
    else:
        detail = kind.meaning
    return problem(kind, detail, request_id, errors=errors, extra=extra), headers


class ProblemResponse(Response):
    """A problem document on its way; its code is left in ``scope["state"]["problem"]``.

    Args:
        document: what `problem` made.
        headers: headers of the answer.
    """

    def __init__(self, document: JsonDict, headers: Mapping[str, str] | None) -> None:
        super().__init__(
            # ASCII, so that no lone surrogate of a hostile body can break the answer.
            json.dumps(document, ensure_ascii=True, allow_nan=False).encode(),
            status_code=document["status"],
            headers=headers,
            media_type=MEDIA_TYPE,
        )
        self._code = document["code"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        scope.setdefault("state", {})["problem"] = self._code
        await super().__call__(scope, receive, send)


def problem_response(
    error: BaseException, request_id: str, content_type: str | None = None
) -> Response:
    """The answer for an exception; see `as_problem`."""
    document, headers = as_problem(error, request_id, content_type)
    return ProblemResponse(document, headers)


def _cut(part: Any) -> Any:
    return part[:_MAX_TEXT] if isinstance(part, str) else part
