"""Audit log: a JSON line per change of the catalogue and per refused attempt."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import ClassVar

from gti_core.errors import GtiError
from gti_core.types import JsonDict
from service.access.keys import redact

logger = logging.getLogger(__name__)

MAX_BYTES = 10_000_000
KEPT_FILES = 10
_MAX_WAITING = 10_000


class AuditError(GtiError):
    """The audit log can't be written."""

    code: ClassVar[str] = "audit_unusable"


class AuditLog:
    """Appends entries in a thread of its own, so that a slow disk holds no request up.

    Args:
        target: path; ``-`` for standard error; empty for no log.
        max_bytes: size at which a file is put aside as ``FILE.1``.
        kept_files: how many of those are kept.
    """

    def __init__(
        self, target: str, *, max_bytes: int = MAX_BYTES, kept_files: int = KEPT_FILES
    ) -> None:
        self._target = target
        self._waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        # Not in the tree of loggers: neither levels nor handlers set elsewhere reach it.
        self._log = logging.Logger("gti.audit", logging.INFO)
        self._log.addHandler(QueueHandler(self._waiting))
        self._listener: QueueListener | None = None
        self._sizes = (max_bytes, kept_files)

    def check(self) -> None:
        """Make sure that the file can be written. Raises AuditError."""
        if self._target in ("", "-"):
            return
        try:
            Path(self._target).parent.mkdir(parents=True, exist_ok=True)
            os.close(_open_private(self._target, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        except OSError as error:
            raise AuditError(
                f"can't write the audit log {self._target}: {error.strerror or error}; choose "
                "another file with --audit-log or GTI_AUDIT_LOG, or off for none"
            ) from error

    def start(self) -> None:
        """Begin to write. The file is opened with the first entry."""
        if not self._target:
            return
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        if self._target != "-":
            max_bytes, kept_files = self._sizes
            handler = _File(
                self._target,
                maxBytes=max_bytes,
                backupCount=kept_files,
                encoding="utf-8",
                delay=True,
            )
        self._listener = QueueListener(self._waiting, handler)
        self._listener.start()

    def stop(self) -> None:
        """Write what waits and close. Blocks until that is done. Idempotent."""
        if self._listener is not None:
            self._listener.stop()
            for handler in self._listener.handlers:
                handler.close()
            self._listener = None

    def write(self, entry: JsonDict) -> None:
        """Take an entry over; returns at once."""
        if not self._target:
            return
        line = redact(json.dumps(entry))
        if self._waiting.qsize() >= _MAX_WAITING:
            # A flood of refused calls or a stuck disk: memory must not grow with it.
            logger.error("the audit log can't keep up; this entry is not in it: %s", line)
            return
        # As an argument: a percent sign in a line is no format.
        self._log.info("%s", line)


class _File(RotatingFileHandler):
    """Readable by its owner only; what can't be written goes to the service's log."""

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(
            _open_private(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            "ab",
            buffering=0,
        )
        return TextIOWrapper(file, encoding="utf-8", write_through=True)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the base's name
        logger.error(
            "the audit log can't be written (%s); this entry is not in it: %s",
            sys.exc_info()[1],
            record.getMessage(),
        )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
