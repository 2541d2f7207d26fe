"""What a request says of its sender: key, host, origin, address."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import Scope

KEY_HEADER = "X-API-Key"
_BEARER = re.compile(r"bearer +(.*)", re.IGNORECASE | re.ASCII)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:\d{0,5})?", re.IGNORECASE | re.ASCII)


def sent_keys(headers: Headers) -> list[str]:
    """What stands where keys are looked for; more than one is for the caller to refuse.

    Authorization of another kind is no key: it may be meant for a proxy on the way.
    """
    bearers = map(_BEARER.fullmatch, headers.getlist("authorization"))
    keys = [found[1] for found in bearers if found is not None]
    return [key.strip(" \t") for key in keys + headers.getlist(KEY_HEADER)]


def own_hosts(host: str) -> frozenset[str]:
    """Names under which a service on a loopback address is asked, without port.

    Args:
        host: the address it listens on.
    """
    own = f"[{host}]" if ":" in host else host
    return frozenset({"localhost", "127.0.0.1", "[::1]", own.lower()})


def is_own_host(headers: Headers, own: Collection[str]) -> bool:
    """Whether the one Host header names this machine."""
    given = headers.getlist("host")
    found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
    return found is not None and found[1].lower() in own


def is_own_origin(headers: Headers, others: Collection[str]) -> bool:
    """Whether a request comes from no page, or from one of this service or of a listed origin.

    Args:
        headers: the request's headers.
        others: further origins that may ask.
    """
    host = headers.get("host")
    return all(
        origin.partition("://")[2] == host or origin in others
        for origin in headers.getlist("origin")
    )


def address(scope: Scope) -> str:
    """The client's address."""
    client = scope.get("client")
    return client[0] if client else "unknown"
