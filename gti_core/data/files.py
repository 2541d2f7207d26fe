"""Files that are there in full or not at all: write beside, fsync, rename, fsync the folder."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gti_core.errors import DataError
from gti_core.types import JsonDict


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Puts ``content`` at ``path``; a crash leaves the old file or the new one, never a part.

    Until it is complete only its owner can read it, whatever the mode.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask for the same lock out, for as long as the block lasts.

    The folder is locked, since the files in it get replaced. Raises OSError.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes renames and deletions inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_lines(records: Iterable[JsonDict]) -> bytes:
    """One JSON object a line, UTF-8, keys in the given order.

    Raises:
        DataError: a value that JSON or UTF-8 has no place for (NaN, a set, half a surrogate pair).
    """
    lines = []
    for record in records:
        try:
            line = json.dumps(record, ensure_ascii=False, allow_nan=False)
            lines.append(line.encode() + b"\n")
        except (TypeError, ValueError) as error:
            raise DataError(f"{ascii(record)[:200]} can't be written as JSON: {error}") from error
    return b"".join(lines)
