"""The check of schemathesis that a valid request is accepted, but for what a schema can't say."""

from __future__ import annotations

import re
from typing import Any

import schemathesis
from schemathesis import Case, CheckContext, Response
from schemathesis.specs.openapi.checks import positive_data_acceptance

# Depends on the bundle, the catalogue or the model.
CODES = {"search_unavailable", "unknown_items", "prompt_too_long"}
MESSAGES = re.compile(
    # Limits from the settings, which /v1/info tells; `k` and the beam width bound each other.
    r"(\d+ entries, )?at most \d+( requests)?(: send the latest ones)?"
    r"|at least k, which is \d+"
    # Two items' ids, and the size of all attributes together.
    r"|item id '.*' stands twice"
    r"|at most \d+ characters of JSON"
    r"|at most \d+ characters after NFC"
    # 5.0 is an integer for JSON Schema.
    r"|must be an integer"
    # A surrogate is text for JSON Schema.
    r"|half a surrogate pair is no text|values are text in UTF-8 and finite",
    re.DOTALL,
)


@schemathesis.check
def valid_request_accepted(ctx: CheckContext, response: Response, case: Case[Any]) -> bool | None:
    """The built-in check; a 422 may also have a reason that stands above."""
    if response.status_code == 422:
        problem = response.json()
        errors = problem.get("errors") or []
        if problem["code"] in CODES:
            return None
        if errors and all(MESSAGES.fullmatch(error["msg"]) for error in errors):
            return None
    return positive_data_acceptance(ctx, response, case)
