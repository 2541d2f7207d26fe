"""Errors that a client sees: one table from exception to status and code, RFC 9457 bodies.

::

    ServiceError
    ├── RequestInvalidError       a value the settings don't allow
    ├── MalformedBodyError        a body that is not JSON
    ├── UnsupportedMediaTypeError a body that is not declared as JSON
    ├── BodyTooLargeError         a body above the limit
    ├── ItemNotFoundError         an id outside the catalogue
    ├── SearchUnavailableError    a search query to a model that was not trained for search
    ├── UnknownItemsRefusedError  a strict request with ids outside the catalogue
    ├── VersionNotServedError     a version that is not served in time
    ├── DeadlineError             no answer within the time that the client gave
    ├── AdminDisabledError        an admin route of a service that has none
    ├── NotReadyError             the engine is still loading, or the service is stopping
    └── ClientClosedError         the client went away before the answer

The engine's own exceptions stand in `service.engine.base`, the store's in `service.store.errors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gti_core.types import JsonDict
from service.engine.base import EngineDeadError, EngineError, PromptTooLongError
from service.store import errors as store

MEDIA_TYPE = "application/problem+json"
MAX_LISTED_ERRORS = 20
"""A body can hold a fault per entry; the answer lists this many and says how many there are."""

_MAX_TEXT = 200


class ServiceError(Exception):
    """Base class. The message is for people and holds no internals.

    Args:
        detail: what is wrong with this request.
        errors: single faults, each ``{"loc": [...], "msg": str}``.
        headers: headers of the answer.
        extra: further members of the problem document.
    """

    def __init__(
        self,
        detail: str,
        *,
        errors: Sequence[JsonDict] = (),
        headers: Mapping[str, str] | None = None,
        extra: JsonDict | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = list(errors)
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})


class RequestInvalidError(ServiceError):
    """A value is well formed but outside what the settings allow."""

    def __init__(self, loc: Sequence[str | int], message: str) -> None:
        super().__init__(
            f"{'.'.join(str(part) for part in loc)}: {message}",
            errors=[{"loc": list(loc), "msg": message}],
        )


class MalformedBodyError(ServiceError):
    """The body is not JSON text in UTF-8."""


class UnsupportedMediaTypeError(ServiceError):
    """The body is not declared as JSON."""


class BodyTooLargeError(ServiceError):
    """The body is larger than the limit."""


class ItemNotFoundError(ServiceError):
    """No item of the catalogue has this id."""


class SearchUnavailableError(ServiceError):
    """The model served was not trained for search."""


class UnknownItemsRefusedError(ServiceError):
    """A strict request names items that the catalogue lacks."""


class DeadlineError(ServiceError):
    """The time that the client gave is over."""


class VersionNotServedError(ServiceError):
    """The version asked for is not served yet."""


class AdminDisabledError(ServiceError):
    """The service has no admin routes as it is set up."""


class NotReadyError(ServiceError):
    """The service can't answer yet, or no longer."""


class ClientClosedError(ServiceError):
    """The client closed the connection; nobody reads the answer."""


@dataclass(frozen=True)
class ProblemKind:
    """One row of the table.

    Args:
        code: stable, machine-readable.
        status: HTTP status.
        title: short summary, the same for every occurrence.
        meaning: what it means and what to do, for the docs.
        exceptions: exceptions that lead to it, subclasses included.
    """

    code: str
    status: int
    title: str
    meaning: str
    exceptions: tuple[type[BaseException], ...] = ()


TABLE: tuple[ProblemKind, ...] = (
    ProblemKind(
        "malformed_body",
        400,
        "The body is not JSON",
        "The body is not valid JSON in UTF-8, or nests too deep. Correct it.",
        (MalformedBodyError,),
    ),
    ProblemKind(
        "admin_disabled",
        403,
        "Admin routes are disabled",
        "Admin routes exist only while the service listens on a loopback address and was not "
        "started with `--no-admin`, and not for pages of other origins; the detail says which.",
        (AdminDisabledError,),
    ),
    ProblemKind(
        "not_found",
        404,
        "No such resource",
        "The path names nothing. The paths are listed under /docs.",
    ),
    ProblemKind(
        "item_not_found",
        404,
        "No such item",
        "No item of the catalogue has this id.",
        (ItemNotFoundError, store.UnknownItemError),
    ),
    ProblemKind(
        "job_not_found", 404, "No such job", "No job has this id.", (store.JobNotFoundError,)
    ),
    ProblemKind(
        "version_not_found",
        404,
        "No such version",
        "No version has this number, or the engine once refused it.",
        (store.VersionNotFoundError,),
    ),
    ProblemKind(
        "method_not_allowed",
        405,
        "Method not allowed",
        "The path exists, but not for this method; the Allow header names those it has.",
    ),
    ProblemKind(
        "item_conflict",
        409,
        "An item id is taken",
        "The catalogue or an unfinished job has the id with other content. Send `replace: true` "
        "for a new row, wait for the job, or cancel it.",
        (store.ItemConflictError,),
    ),
    ProblemKind(
        "idempotency_conflict",
        409,
        "The Idempotency-Key was used before",
        "The same key came with another body. Use a new key for a new request.",
        (store.IdempotencyConflictError,),
    ),
    ProblemKind(
        "reserve_exhausted",
        409,
        "Not enough reserved codes are left",
        "The request has more items than `catalog.codes_left` of /v1/info. Send fewer; then "
        "make a new base bundle with a larger reserve.",
        (store.ReserveExhaustedError,),
    ),
    ProblemKind(
        "job_not_cancellable",
        409,
        "The job can't be cancelled",
        "The job has ended or is being published; its `state` says which.",
        (store.JobNotCancellableError,),
    ),
    ProblemKind(
        "version_not_served",
        409,
        "The version is not served yet",
        "`min_version` is above the version served, `version`, and did not come in time. Try "
        "again; after a rollback it may never come.",
        (VersionNotServedError,),
    ),
    ProblemKind(
        "body_too_large",
        413,
        "The body is too large",
        "The body exceeds `limits.max_body_bytes` of /v1/info. Send less.",
        (BodyTooLargeError,),
    ),
    ProblemKind(
        "unsupported_media_type",
        415,
        "The body is not declared as JSON",
        "Send the header `Content-Type: application/json`.",
        (UnsupportedMediaTypeError,),
    ),
    ProblemKind(
        "validation_failed",
        422,
        "The request is not valid",
        "A field is missing, unknown, of the wrong type or outside its limits; `errors` says "
        "which. The limits stand in /v1/info. Sending it again unchanged fails again.",
        (RequestValidationError, RequestInvalidError),
    ),
    ProblemKind(
        "prompt_too_long",
        422,
        "The prompt is too long",
        "The history or query makes a prompt longer than the model takes. Send a shorter one.",
        (PromptTooLongError,),
    ),
    ProblemKind(
        "unknown_items",
        422,
        "Unknown items in a strict request",
        "Ids of the request are not in the catalogue; `unknown_items` lists them. Leave them out, "
        "or send `strict: false`.",
        (UnknownItemsRefusedError,),
    ),
    ProblemKind(
        "search_unavailable",
        422,
        "Search is not available",
        "The model served was not trained for search: `search` of /v1/info is false. Send a "
        "history instead of a query.",
        (SearchUnavailableError,),
    ),
    ProblemKind(
        "client_closed",
        499,
        "The client closed the connection",
        "Seen in logs only: the client went away and the work was given up.",
        (ClientClosedError,),
    ),
    ProblemKind(
        "internal_error",
        500,
        "Internal error",
        "A fault of the service. Report it with the request id, which the log also names.",
    ),
    ProblemKind(
        "not_ready",
        503,
        "The service is not ready",
        "The engine is loading, or the service is stopping; `state` says which. Try again after "
        "the seconds in Retry-After.",
        (NotReadyError,),
    ),
    ProblemKind(
        "engine_dead",
        503,
        "The engine is gone",
        "The engine ended and the service is about to end too; its supervisor should start it "
        "again. Try another replica.",
        (EngineDeadError,),
    ),
    ProblemKind(
        "store_unavailable",
        503,
        "The store can't be used",
        "The database of versions and jobs can't be read or written; the log says why. "
        "Recommendations go on with the version served. Try again.",
        (store.StoreError,),
    ),
    ProblemKind(
        "engine_error",
        503,
        "The engine could not answer",
        "The engine failed on this request; the log names the cause under the request id.",
        (EngineError,),
    ),
    ProblemKind(
        "deadline_exceeded",
        504,
        "The answer took too long",
        "The request's `timeout_ms` is over; its work was given up. Send a longer one, or ask for "
        "less.",
        (DeadlineError,),
    ),
)

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
            {"loc": [_cut(part) for part in fault["loc"]], "msg": _cut(fault["msg"])}
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


def problem_response(
    error: BaseException, request_id: str, content_type: str | None = None
) -> Response:
    """The answer for an exception; see `as_problem`."""
    document, headers = as_problem(error, request_id, content_type)
    return Response(
        # ASCII, so that no lone surrogate of a hostile body can break the answer.
        json.dumps(document, ensure_ascii=True, allow_nan=False).encode(),
        status_code=document["status"],
        headers=headers,
        media_type=MEDIA_TYPE,
    )


def _cut(part: Any) -> Any:
    return part[:_MAX_TEXT] if isinstance(part, str) else part
