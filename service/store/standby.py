"""A second copy of a SQLite store, for the day the first one can't be read.

A disk that fills up or a stray tool can damage `gti.db`; without a copy, items that were retired
would come back. The copy is refreshed after a version is served, so it holds every version that
was, up to the last refresh.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path

from gti_core.data.files import locked_folder, sync_folder

logger = logging.getLogger(__name__)

SUFFIX = ".copy"
_SMALLEST_PAGE = 512
"""Bytes; a database has at least one page."""
_SHARE = 0.05
"""Most of the time that copying may take: a large store is copied less often."""


class Standby:
    """The copy of one SQLite file, which every process that serves it has a hand on.

    Args:
        file: the store; the copy lies beside it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.path = file.with_name(file.name + SUFFIX)
        self._not_before = 0.0

    def refresh(self) -> bool:
        """Copy the store if that is due; true if the copy is up to date now.

        Raises:
            OSError, sqlite3.Error: the copy can't be written; the old one is still there.
        """
        began = time.monotonic()
        if began < self._not_before:
            return False
        # One at a time: the copy in the making has one name.
        with locked_folder(self.path.parent):
            self._copy()
        ended = time.monotonic()
        self._not_before = ended + (ended - began) / _SHARE
        return True

    def _copy(self) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        partial.unlink(missing_ok=True)
        with (
            contextlib.closing(
                sqlite3.connect(f"{self._file.as_uri()}?mode=ro", uri=True)
            ) as source,
            contextlib.closing(sqlite3.connect(partial)) as target,
        ):
            source.backup(target)
            # A copy in one file, that a crash leaves no second half of.
            target.execute("PRAGMA journal_mode=DELETE")
            [verdict] = target.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"the store is damaged: {verdict}")
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(self.path)
        sync_folder(self.path.parent)

    def is_emptied(self) -> bool:
        """Whether the store is cut so short that SQLite takes it for a new one."""
        if not (self.path.is_file() and self._file.is_file()):
            return False
        return self._file.stat().st_size < _SMALLEST_PAGE

    def restore(self) -> Path | None:
        """Put the copy in the place of a damaged store, which is kept under another name.

        For who holds the folder's lock (`gti_core.data.files.locked_folder`).

        Returns:
            Where the damaged file is now, or None: there is no copy, and nothing was done.
        """
        if not self.path.is_file():
            return None
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        aside = self._file.with_name(f"{self._file.name}.damaged-{stamp}")
        fresh = self._file.with_name(self._file.name + ".restoring")
        shutil.copyfile(self.path, fresh)
        with fresh.open("rb") as written:
            os.fsync(written.fileno())
        for ending in ("-wal", "-shm"):
            # They belong to the damaged file; SQLite would apply them to any of its name.
            with contextlib.suppress(FileNotFoundError):
                self._file.with_name(self._file.name + ending).replace(f"{aside}{ending}")
        self._file.replace(aside)
        fresh.replace(self._file)
        sync_folder(self._file.parent)
        return aside
