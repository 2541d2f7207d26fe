"""The table of problems: exception -> status, code and what it means."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.exceptions import RequestValidationError

from service.engine.base import EngineDeadError, EngineError, PromptTooLongError
from service.errors import (
    AdminDisabledError,
    BodyTooLargeError,
    ClientClosedError,
    DeadlineError,
    ForbiddenScopeError,
    ForeignHostError,
    ItemNotFoundError,
    MalformedBodyError,
    NotReadyError,
    OverloadedError,
    RateLimitedError,
    RequestInvalidError,
    SearchUnavailableError,
    UnauthorizedError,
    UnknownItemsRefusedError,
    UnsupportedMediaTypeError,
    VersionNotServedError,
)
from service.store import errors as store


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
        "unauthorized",
        401,
        "A valid key is needed",
        "No key was sent, or it is unknown, expired or revoked. Send one with "
        "`Authorization: Bearer KEY` or `X-API-Key: KEY`; keys in the query are not read. An "
        "operator makes keys with `gti keys add`.",
        (UnauthorizedError,),
    ),
    ProblemKind(
        "forbidden_scope",
        403,
        "The key's scope is too small",
        "The key is valid, but admin routes need one made with `--scope admin`.",
        (ForbiddenScopeError,),
    ),
    ProblemKind(
        "admin_disabled",
        403,
        "Admin routes are disabled",
        "The service was started with `--no-admin` or without a store, or the request comes from "
        "a page of another origin; the detail says which.",
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
        "foreign_host",
        421,
        "The Host header names another machine",
        "While it asks for no keys, the service answers only where Host is localhost, 127.0.0.1, "
        "[::1] or its own address. Behind a proxy, run it with `--auth on`.",
        (ForeignHostError,),
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
        "rate_limited",
        429,
        "Too many requests",
        "The key, or without keys the address, has sent more than `--rate-limit` allows. Wait for "
        "the seconds in Retry-After; the RateLimit headers say what is left.",
        (RateLimitedError,),
    ),
    ProblemKind(
        "overloaded",
        429,
        "Too much work under way",
        "The beams and prompts under way fill the engine for longer than the request may wait "
        "(`--max-queue-ms`, `--max-queued-beams`, its deadline). Nothing was begun. Try again "
        "after the seconds in Retry-After (`retry_after_s` in the body), ask for less, or add "
        "replicas.",
        (OverloadedError,),
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
        "The request's `timeout_ms` is over, or without one the service's `--timeout-ms`; its work "
        "was given up. Send a longer one, or ask for less.",
        (DeadlineError,),
    ),
)
