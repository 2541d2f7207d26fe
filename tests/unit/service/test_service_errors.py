"""The table of errors and its documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from service.engine.base import EngineDeadError, EngineError, PromptTooLongError
from service.errors import ItemNotFoundError, RequestInvalidError, ServiceError
from service.problem_table import TABLE
from service.problems import BY_CODE, kind_of, problem_response

DOC = Path(__file__).parents[3] / "docs" / "errors.md"


def test_codes_are_distinct_and_no_exception_stands_twice() -> None:
    assert len(BY_CODE) == len(TABLE)
    exceptions = [cls for kind in TABLE for cls in kind.exceptions]
    assert len(set(exceptions)) == len(exceptions)


def test_every_service_error_is_in_the_table() -> None:
    listed = {cls for kind in TABLE for cls in kind.exceptions}
    assert set(ServiceError.__subclasses__()) <= listed


def test_doc_equals_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.+?) \| (.+?) \|$", DOC.read_text(), re.MULTILINE)
    assert rows == [(kind.code, str(kind.status), kind.title, kind.meaning) for kind in TABLE]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError(), "engine_error"),
        (EngineDeadError(), "engine_dead"),
        (PromptTooLongError(), "prompt_too_long"),
        (type("Nearer", (EngineDeadError,), {})(), "engine_dead"),
        (ItemNotFoundError("no item"), "item_not_found"),
        (HTTPException(404), "not_found"),
        (HTTPException(405), "method_not_allowed"),
        (HTTPException(418), "internal_error"),
        (ValueError("x"), "internal_error"),
    ],
)
def test_kind_of(error: Exception, code: str) -> None:
    assert kind_of(error).code == code


def test_response_of_a_service_error() -> None:
    response = problem_response(RequestInvalidError(("body", "k"), "at most 200"), "r1")
    assert response.status_code == 422
    assert response.media_type == "application/problem+json"
    assert json.loads(response.body) == {
        "type": "urn:gti-serve:error:validation_failed",
        "title": "The request is not valid",
        "status": 422,
        "detail": "body.k: at most 200",
        "code": "validation_failed",
        "request_id": "r1",
        "errors": [{"loc": ["body", "k"], "msg": "at most 200"}],
    }


def test_unknown_errors_say_nothing_of_their_cause() -> None:
    response = problem_response(RuntimeError("/secret/path"), "r1")
    assert response.status_code == 500
    assert b"secret" not in response.body
