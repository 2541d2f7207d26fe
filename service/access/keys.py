"""Keys: how they look, how one is made, what is kept of it."""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, date, datetime, timedelta
from enum import IntEnum
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from gti_core.errors import GtiError

_ID = "[0-9a-f]{8}"
_SECRET = "[A-Za-z0-9_-]{43,128}"  # noqa: S105 - a pattern
_KEY = re.compile(f"gti_({_ID})_({_SECRET})", re.ASCII)
_DAYS = re.compile(r"(\d{1,5})d", re.ASCII)
_SECRET_BYTES = 32

ScopeName = Literal["read", "admin"]


class KeysError(GtiError):
    """A key can't be made, found or read. Never names a secret."""

    code: ClassVar[str] = "keys_invalid"


class Scope(IntEnum):
    """What a route asks for and a key allows; the higher includes the lower."""

    OPEN = 0
    READ = 1
    ADMIN = 2


def _printable(name: str) -> str:
    # Names are printed by `gti keys list`: no escape sequences for a terminal.
    if not name.isprintable() or not name.strip():
        raise ValueError("use printable characters")
    return name


class KeyRecord(BaseModel):
    """What is kept of a key: everything but its secret.

    Args:
        id: stands in the key, in listings and in logs; no secret.
        name: what it is for.
        scope: ``read``, or ``admin``, which includes it.
        created: when it was made.
        expires: from when on it is refused; None: never.
        revoked: when it was taken back; None: it was not.
        sha256: hash of the whole key, hexadecimal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    id: str = Field(pattern=f"^{_ID}$")
    name: Annotated[str, Field(max_length=100), AfterValidator(_printable)]
    scope: ScopeName
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def allows(self) -> Scope:
        """What the key allows while it is valid."""
        return Scope.ADMIN if self.scope == "admin" else Scope.READ

    def state(self, now: datetime) -> Literal["valid", "expired", "revoked"]:
        """Whether the key is in force at a moment."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "valid"


def make_key(
    name: str, scope: ScopeName, now: datetime, expires: datetime | None = None
) -> tuple[str, KeyRecord]:
    """A new key and its record.

    Raises:
        KeysError: no name that can be printed.
    """
    key_id = secrets.token_hex(4)
    key = f"gti_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    try:
        record = KeyRecord(
            id=key_id, name=name, scope=scope, created=now, expires=expires, sha256=hash_key(key)
        )
    except ValueError as error:
        raise KeysError("a key's name has 1 to 100 printable characters") from error
    return key, record


def hash_key(key: str) -> str:
    """Hash of a key, hexadecimal.

    SHA-256 without salt or stretching is right here: a secret of 256 random bits can't be guessed
    however fast guessing is, unlike a password; and it costs a request a microsecond.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def key_id(text: str) -> str | None:
    """The id inside a text that has a key's form; None if it has not."""
    found = _KEY.fullmatch(text)
    return None if found is None else found[1]


def redact(text: str) -> str:
    """The text with the secret of every key in it left out: for logs."""
    return _KEY.sub(r"gti_\1_***", text) if "gti_" in text else text


def parse_expiry(text: str, now: datetime) -> datetime:
    """When a key expires: ``90d`` from now, or the end of a day such as ``2027-01-31`` (UTC).

    Raises:
        KeysError: neither, or not in the future.
    """
    days = _DAYS.fullmatch(text)
    try:
        if days is not None:
            moment = now + timedelta(days=int(days[1]))
        else:
            day = date.fromisoformat(text)
            if text != day.isoformat():
                raise ValueError("another form of a date")
            moment = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    except (ValueError, OverflowError):
        raise KeysError(
            f"--expires takes days such as 90d or a date such as 2027-01-31, not {text!r}"
        ) from None
    if moment <= now:
        raise KeysError(f"--expires {text} is not in the future")
    return moment
