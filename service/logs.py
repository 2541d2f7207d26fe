"""Logging: standard library, one line an event, each with the id of the request it belongs to.

Secrets of keys are left out of every line, wherever in a request they stood.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal

from service.access.keys import redact

request_id_var: ContextVar[str] = ContextVar("request_id", default="-")
"""Id of the request being served by the current task; ``-`` outside requests."""

trace_id_var: ContextVar[str] = ContextVar("trace_id", default="")
"""Id of the trace that the current task belongs to; empty where there is none."""

_EXTRA_FIELDS = ("method", "path", "status", "took_ms", "version", "code")


class RequestIdFilter(logging.Filter):
    """Puts the current request's id on every record, as ``record.request_id``; its trace's too."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id_var.get()
        record.trace_id = trace_id_var.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the ids, access fields."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "-"),
        }
        if trace_id := getattr(record, "trace_id", ""):
            entry["trace_id"] = trace_id
        for name in _EXTRA_FIELDS:
            if getattr(record, name, None) is not None:
                entry[name] = getattr(record, name)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return redact(json.dumps(entry))


class TextFormatter(logging.Formatter):
    """One line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s [%(request_id)s] %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def configure_logging(level: str, style: Literal["text", "json"]) -> None:
    """Send every logger's lines to stderr. Replaces handlers set before.

    Args:
        level: least severe level, a name of `logging`, any case.
        style: ``text`` for people, ``json`` for collectors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The service writes its own access line, with the request id.
    logging.getLogger("uvicorn.access").disabled = True
    logging.getLogger("uvicorn.error").setLevel(
        logging.WARNING if level.lower() != "debug" else logging.DEBUG
    )
