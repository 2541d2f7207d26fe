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
    ├── UnauthorizedError         no key, or none that is valid
    ├── ForbiddenScopeError       a valid key that is not meant for this
    ├── ForeignHostError          a request to another name, while there are no keys
    ├── RateLimitedError          more requests than the caller may send
    ├── OverloadedError           more work than can be done in time
    ├── AdminDisabledError        an admin route of a service that has none
    ├── NotReadyError             the engine is still loading, or the service is stopping
    └── ClientClosedError         the client went away before the answer

The engine's own exceptions stand in `service.engine.base`, the store's in `service.store.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gti_core.types import JsonDict

RETRY_AFTER_S = 5
"""Seconds after which one may ask a service again that was not ready."""


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


class UnauthorizedError(ServiceError):
    """No key was sent, or none that is valid."""


class ForbiddenScopeError(ServiceError):
    """The key is valid, but not for this."""


class ForeignHostError(ServiceError):
    """The Host header names another machine, as after DNS rebinding."""


class RateLimitedError(ServiceError):
    """The caller sent more than its rate allows."""


class OverloadedError(ServiceError):
    """There is more work under way than can be done in time.

    Args:
        detail: what is full.
        retry_after_s: whole seconds after which there should be room; in the body too, since an
            answer within a batch has no headers.
    """

    def __init__(self, detail: str, retry_after_s: int) -> None:
        super().__init__(
            detail,
            headers={"Retry-After": str(retry_after_s)},
            extra={"retry_after_s": retry_after_s},
        )


class AdminDisabledError(ServiceError):
    """The service has no admin routes as it is set up."""


class NotReadyError(ServiceError):
    """The service can't answer yet, or no longer."""


def not_ready(detail: str, state: str) -> NotReadyError:
    """The error of a service that is "starting" or "stopping", with the time to try again."""
    return NotReadyError(
        detail, headers={"Retry-After": str(RETRY_AFTER_S)}, extra={"state": state}
    )


class ClientClosedError(ServiceError):
    """The client closed the connection; nobody reads the answer."""
