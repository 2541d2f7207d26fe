"""The keys file: JSON with the records of all keys, replaced as a whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gti_core.data.files import locked_folder, write_atomic
from service.access.keys import KeyRecord, KeysError, ScopeName, make_key

MODE = 0o600
_FORMAT: Literal["gti-keys/1"] = "gti-keys/1"


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    format: Literal["gti-keys/1"]
    keys: tuple[KeyRecord, ...]


def read_keys(path: Path, *, must_exist: bool = False) -> tuple[KeyRecord, ...]:
    """All records, oldest first; none where there need be no file and is none.

    Raises:
        KeysError: the file can't be read or is damaged. The message quotes nothing of it.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not must_exist:
            return ()
        raise KeysError(f"{path}: can't be read: {error.strerror or error}") from error
    try:
        records = _Content.model_validate_json(content).keys
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise KeysError(f"{path}: is no keys file: {where or 'JSON'}: {fault['msg']}") from None
    if len({record.id for record in records}) < len(records):
        raise KeysError(f"{path}: is no keys file: an id stands there twice")
    return records


def add_key(
    path: Path, name: str, scope: ScopeName, now: datetime, expires: datetime | None = None
) -> tuple[str, KeyRecord]:
    """Make a key and keep its record; returns the key, which nobody can learn again.

    Raises:
        KeysError: no name that can be printed, or a file that can't be used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeysError(f"{path.parent}: {error.strerror or error}") from error
    with _changing(path):
        records = read_keys(path)
        key, record = make_key(name, scope, now, expires)
        while record.id in {known.id for known in records}:
            key, record = make_key(name, scope, now, expires)
        _write(path, [*records, record])
    return key, record


def revoke_key(path: Path, key_id: str, now: datetime) -> KeyRecord:
    """Take a key back. Its record stays, so that listings and old logs can be understood.

    Raises:
        KeysError: no such key, or a file that can't be used.
    """
    with _changing(path):
        records = {record.id: record for record in read_keys(path)}
        if key_id not in records:
            # What was typed may be a whole key: it is not repeated.
            raise KeysError(f"{path}: no key has this id; `gti keys list` shows them")
        if records[key_id].revoked is None:
            records[key_id] = records[key_id].model_copy(update={"revoked": now})
            _write(path, list(records.values()))
    return records[key_id]


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    # Two commands at a time must not lose a key.
    try:
        with locked_folder(path.parent):
            yield
    except OSError as error:
        raise KeysError(f"{path.parent}: {error.strerror or error}") from error


def _write(path: Path, records: Sequence[KeyRecord]) -> None:
    content = {"format": _FORMAT, "keys": [record.model_dump(mode="json") for record in records]}
    try:
        # A link, as mounted secrets are, stays a link.
        write_atomic(path.resolve(), (json.dumps(content, indent=1) + "\n").encode(), MODE)
    except OSError as error:
        raise KeysError(f"{path}: can't be written: {error.strerror or error}") from error
