"""Keyring: the keys that a running service knows, kept up to date with the file."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from service.access.keyfile import read_keys
from service.access.keys import KeyRecord, KeysError, hash_key, key_id

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
_NO_HASH = hashlib.sha256(b"").hexdigest()
_Signature = tuple[int, int, int, int] | None


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Verdict:
    """What a text sent as a key turned out to be.

    Args:
        state: ``valid``, or why it is not. For logs: callers are told the same in each case.
        record: the key's record, where the secret was right.
    """

    state: Literal["valid", "malformed", "unknown", "expired", "revoked"]
    record: KeyRecord | None = None


class Keyring:
    """Verifies keys. Reads its file again when that has changed, at most once a second.

    A file that is damaged, unreadable or gone while the service runs leaves the last good keys in
    force: a slip of the operator's must not lock everybody out. The log says so.

    Args:
        path: the keys file.
        interval_s: seconds between looks at the file.
        now: the time, for expiry.

    Raises:
        KeysError: the file is damaged.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float = LOOK_INTERVAL_S,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._now = now
        self._signature = _signature(path)
        self._records = {record.id: record for record in read_keys(path)}
        self._looked = time.monotonic()

    def any_valid(self) -> bool:
        """Whether any key is in force."""
        return any(record.state(self._now()) == "valid" for record in self._records.values())

    def verify(self, text: str) -> Verdict:
        """What a text is. Takes as long for an unknown id as for a wrong secret."""
        known = key_id(text)
        if known is None:
            return Verdict("malformed")
        record = self._records.get(known)
        expected = _NO_HASH if record is None else record.sha256
        if not hmac.compare_digest(expected, hash_key(text)) or record is None:
            return Verdict("unknown")
        return Verdict(record.state(self._now()), record)

    async def refresh(self) -> None:
        """Take over a changed file. Looks at most once per interval, off the event loop."""
        if time.monotonic() - self._looked < self._interval_s:
            return
        # Set first: requests that come meanwhile don't look too, and go by the keys there are.
        self._looked = time.monotonic()
        await asyncio.to_thread(self._look)

    def _look(self) -> None:
        signature = _signature(self._path)
        if signature == self._signature:
            return
        # Kept even when reading fails, so that one fault is one line in the log.
        self._signature = signature
        try:
            records = read_keys(self._path, must_exist=True)
        except KeysError as error:
            logger.error("the last good keys stay in force: %s", error)
            return
        self._records = {record.id: record for record in records}
        logger.info("%s has changed: %d keys", self._path, len(records))


def _signature(path: Path) -> _Signature:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
