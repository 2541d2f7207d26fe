"""Which route needs what. Decided by the route that will run, not by what a path looks like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute, Match
from starlette.types import Scope as AsgiScope

from service.access.keys import Scope

OPEN_PATHS = frozenset(
    {
        "/livez",
        "/readyz",
        "/startupz",
        "/docs",
        "/docs/oauth2-redirect",
        "/docs-static",
        "/openapi.json",
    }
)
"""Paths of routes that answer without a key: probes have none, and the docs say how to get one."""
ADMIN_TAG = "admin"
_ADMIN_PREFIX = "/v1/admin"
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})


def needed(route: BaseRoute | None) -> Scope:
    """What a route needs. What nobody thought of, a path without a route included, needs a key."""
    path = getattr(route, "path", "")
    if path in OPEN_PATHS:
        return Scope.OPEN
    # Two signs, so that neither a forgotten tag nor a new prefix opens an admin route.
    if ADMIN_TAG in (getattr(route, "tags", None) or ()) or path.startswith(_ADMIN_PREFIX):
        return Scope.ADMIN
    return Scope.READ


def template(route: BaseRoute | None) -> str | None:
    """A route's path with its parameters' names, such as /v1/items/{item_id}; None without one."""
    found: str | None = getattr(route, "path_format", None) or getattr(route, "path", None)
    return found


def changes(method: str) -> bool:
    """Whether requests with a method change something."""
    return method in _CHANGING


def allowed_methods(routes: Sequence[BaseRoute], scope: AsgiScope) -> list[str]:
    """Methods that some route has for a request's path, sorted. Where there is GET, there is HEAD.

    Args:
        routes: the application's routes.
        scope: the request's.
    """
    methods: set[str] = set()
    for route in routes:
        if route.matches(scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def match(routes: Sequence[BaseRoute], scope: AsgiScope) -> tuple[BaseRoute | None, dict[str, Any]]:
    """The route that the router will run, and its path parameters.

    A route that has the path but not the method counts too: it answers 405.
    """
    partial: BaseRoute | None = None
    for route in routes:
        fit, child = route.matches(scope)
        if fit is Match.FULL:
            return route, dict(child.get("path_params", {}))
        if fit is Match.PARTIAL and partial is None:
            partial = route
    return partial, {}
