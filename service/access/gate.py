"""The gate: pure ASGI middleware in front of every route, whatever kind it is.

It refuses by default: a route that the rules don't know needs a key. A request passes, in this
order, the check of its host (while there are no keys), of its key, of its rate, of the key's scope
and of its origin. Nothing of its body has been read by then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from gti_core.types import JsonDict
from service.access.audit import AuditLog
from service.access.credentials import address, is_own_host, is_own_origin, own_hosts, sent_keys
from service.access.keyring import Keyring
from service.access.keys import KeyRecord, Scope
from service.access.limiter import Allowance, RateLimiter
from service.access.rules import changes, match, needed, template
from service.errors import (
    AdminDisabledError,
    ForbiddenScopeError,
    ForeignHostError,
    RateLimitedError,
    ServiceError,
    UnauthorizedError,
)
from service.problems import problem_response
from service.settings import Settings

_CHALLENGE = 'Bearer realm="gti-serve"'
_MAX_TEXT = 256
LOOPBACK = "loopback"
"""Stands in the audit log for whoever asks while there are no keys."""


@dataclass
class _Visit:
    """One request on its way through the gate."""

    headers: Headers
    client: str
    need: Scope
    record: KeyRecord | None = None
    refused: str | None = None
    status: int = 0
    facts: JsonDict = field(default_factory=dict)


class AccessGate:
    """Lets through who may.

    Args:
        app: the application.
        routes: the application's routes.
        settings: hosts and origins.
        keyring: verifies keys; None: no keys are asked for.
        limiter: limits rates; None: no limit.
        audit: takes an entry per change and per refused change.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        settings: Settings,
        keyring: Keyring | None,
        limiter: RateLimiter | None,
        audit: AuditLog,
    ) -> None:
        self._app = app
        self._routes = routes
        self._keyring = keyring
        self._limiter = limiter
        self._audit = audit
        self._own_hosts = own_hosts(settings.host)
        # A page can't send a key unless its user gave it one. Without keys, any page would do.
        self._origins = settings.cors_origins if keyring is not None else ()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There are no such routes; if one comes, it must not slip past.
            await send({"type": "websocket.close", "code": 1008})
            return
        route, parameters = match(self._routes, scope)
        visit = _Visit(Headers(scope=scope), address(scope), needed(route))
        visit.facts |= _named(parameters)
        scope["state"]["audit"] = visit.facts
        scope["state"]["route"] = template(route)
        allowance: Allowance | None = None

        async def send_watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                if allowance is not None:
                    self._tell(allowance, MutableHeaders(scope=message))
            await send(message)

        try:
            try:
                await self._know(visit)
                allowance = self._count(visit)
                self._admit(visit, allowance)
            except ServiceError as error:
                answer = problem_response(error, scope["state"]["request_id"])
                await answer(scope, receive, send_watched)
                return
            await self._app(scope, receive, send_watched)
        finally:
            if visit.need is Scope.ADMIN and changes(scope["method"]):
                self._audit.write(self._entry(scope, route, visit))

    async def _know(self, visit: _Visit) -> None:
        """Find out who asks."""
        if self._keyring is None:
            if not is_own_host(visit.headers, self._own_hosts):
                visit.refused = "foreign_host"
                raise ForeignHostError(
                    "without keys the service answers to this machine's own names only, such as "
                    "localhost; behind a proxy, run it with --auth on"
                )
            return
        if visit.need is Scope.OPEN:
            return
        sent = sent_keys(visit.headers)
        if len(sent) != 1:
            visit.refused = "several_keys" if sent else "no_key"
            raise UnauthorizedError(
                "send one key, as Authorization: Bearer KEY or as X-API-Key: KEY",
                headers={"WWW-Authenticate": _CHALLENGE},
            )
        await self._keyring.refresh()
        verdict = self._keyring.verify(sent[0])
        visit.record = verdict.record
        if verdict.state != "valid":
            visit.refused = verdict.state
            # The same words whatever is wrong with it: a caller learns nothing of other keys.
            raise UnauthorizedError(
                "the key is not valid",
                headers={"WWW-Authenticate": f'{_CHALLENGE}, error="invalid_token"'},
            )

    def _count(self, visit: _Visit) -> Allowance | None:
        if self._limiter is None or visit.need is Scope.OPEN:
            return None
        return self._limiter.hit(visit.client if visit.record is None else visit.record.id)

    def _admit(self, visit: _Visit, allowance: Allowance | None) -> None:
        """Refuse what this caller may not do, or not now."""
        if allowance is not None and not allowance.allowed:
            visit.refused = "rate_limited"
            wait_s = max(1, math.ceil(allowance.retry_after_s))
            raise RateLimitedError(
                f"too many requests: the next one may come in {wait_s} s",
                headers={"Retry-After": str(wait_s)},
            )
        if visit.record is not None and visit.record.allows < visit.need:
            visit.refused = "scope"
            raise ForbiddenScopeError(
                f"the key's scope is {visit.record.scope}; this route needs admin",
                headers={
                    "WWW-Authenticate": f'{_CHALLENGE}, error="insufficient_scope", scope="admin"'
                },
            )
        # A page of another site may make a browser on this machine send requests here.
        if visit.need is Scope.ADMIN and not is_own_origin(visit.headers, self._origins):
            visit.refused = "foreign_origin"
            raise AdminDisabledError("the request comes from a page of another origin")

    def _tell(self, allowance: Allowance, headers: MutableHeaders) -> None:
        """RateLimit headers (draft-ietf-httpapi-ratelimit-headers)."""
        if self._limiter is not None:
            headers["RateLimit-Policy"] = (
                f'"default";q={self._limiter.burst};w={self._limiter.window_s}'
            )
            headers["RateLimit"] = (
                f'"default";r={allowance.remaining};t={math.ceil(allowance.full_after_s)}'
            )

    def _entry(self, scope: AsgiScope, route: BaseRoute | None, visit: _Visit) -> JsonDict:
        now = time.time()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        entry: JsonDict = {
            "time": f"{seconds}.{int(now % 1 * 1000):03d}Z",
            "request_id": scope["state"]["request_id"],
            "key_id": LOOPBACK if self._keyring is None else None,
            "key_name": None,
            "client": visit.client,
            "method": scope["method"],
            "route": getattr(route, "path", None),
            "status": visit.status,
        }
        if visit.record is not None:
            entry |= {"key_id": visit.record.id, "key_name": visit.record.name}
        if visit.refused is not None:
            entry["refused"] = visit.refused
        return entry | visit.facts


def _named(parameters: dict[str, Any]) -> JsonDict:
    """Path parameters as facts for the audit log, no longer than need be."""
    facts: JsonDict = {name: str(value)[:_MAX_TEXT] for name, value in parameters.items()}
    number = facts.pop("number", "")
    if number.isdecimal() and number.isascii():
        facts["version"] = int(number)
    return facts
