"""Keys in the OpenAPI document: schemes, what each operation needs, how it refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from gti_core.types import JsonDict
from service.access.credentials import KEY_HEADER
from service.access.keys import Scope
from service.access.rules import needed
from service.problems import MEDIA_TYPE

_NOTE = "Asked for unless the service listens on a loopback address (`--auth`)."
SCHEMES: JsonDict = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": f"A key made with `gti keys add`. {_NOTE}",
    },
    "apiKey": {
        "type": "apiKey",
        "in": "header",
        "name": KEY_HEADER,
        "description": f"The same key in a header of its own. {_NOTE}",
    },
}
CODES = {
    Scope.OPEN: (),
    Scope.READ: ("unauthorized", "rate_limited"),
    Scope.ADMIN: ("unauthorized", "forbidden_scope", "rate_limited"),
}
"""Error codes of the gate, by what a route needs."""


def operations(document: JsonDict, routes: Iterable[BaseRoute]) -> Iterable[tuple[Scope, JsonDict]]:
    """Every operation of a document, with what its route needs."""
    for route in routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods:
                yield needed(route), document["paths"][route.path_format][method.lower()]


def secure(document: JsonDict, routes: Sequence[BaseRoute], problems: Any) -> None:
    """Add security schemes, scopes and the gate's errors to a document.

    Args:
        document: what `fastapi.openapi.utils.get_openapi` made; changed in place.
        routes: the application's routes.
        problems: `service.api.deps.problems`.
    """
    document["components"]["securitySchemes"] = SCHEMES
    for need, operation in operations(document, routes):
        roles = [] if need is Scope.OPEN else [need.name.lower()]
        # Roles would be read as OAuth scopes. The empty one is true on loopback addresses.
        operation["security"] = [*({name: []} for name in SCHEMES), {}] if roles else []
        if roles:
            operation["x-required-scope"] = roles[0]
        responses = operation["responses"]
        for status, refusal in problems(*CODES[need]).items():
            known = responses.setdefault(str(status), refusal)
            if known is not refusal:
                title = refusal["description"]
                known["description"] += f"; {title[0].lower()}{title[1:]}"
                known["content"][MEDIA_TYPE]["examples"] |= refusal["content"][MEDIA_TYPE][
                    "examples"
                ]
        operation["responses"] = dict(sorted(responses.items()))
