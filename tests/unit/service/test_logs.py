"""Log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from service.logs import configure_logging, request_id_var


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = False


def test_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    token = request_id_var.set("r1")
    logging.getLogger("gti.test").info("two\nlines", extra={"status": 200, "took_ms": 1.5})
    logging.getLogger("gti.test").debug("not written")
    request_id_var.reset(token)
    [line] = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "gti.test",
        "message": "two\nlines",
        "request_id": "r1",
        "status": 200,
        "took_ms": 1.5,
    }


def test_text_line_names_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "text")
    logging.getLogger("gti.test").warning("hello")
    assert "gti.test [-] hello" in capsys.readouterr().err


def test_exception_stands_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error", "json")
    try:
        raise ValueError("inside")
    except ValueError:
        logging.getLogger("gti.test").exception("failed")
    [line] = capsys.readouterr().err.splitlines()
    assert "ValueError: inside" in json.loads(line)["exception"]
