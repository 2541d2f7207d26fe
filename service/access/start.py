"""What the settings say of access, made into parts; refused at the start where it can't be."""

from __future__ import annotations

import shlex
from typing import ClassVar

from gti_core.errors import GtiError
from service.access.audit import AuditLog
from service.access.keyring import Keyring
from service.access.limiter import RateLimiter
from service.settings import Settings


class AccessError(GtiError):
    """Nobody could call the service as it is set up."""

    code: ClassVar[str] = "no_valid_key"


def check_access(settings: Settings) -> None:
    """Refuse early what would be refused late.

    Raises:
        AccessError, KeysError: as `open_keyring`.
        AuditError: the audit log can't be written.
    """
    open_keyring(settings)
    open_audit(settings).check()


def open_keyring(settings: Settings) -> Keyring | None:
    """The keys; None where none are asked for.

    Raises:
        AccessError: no key is valid.
        KeysError: the keys file is damaged.
    """
    if not settings.auth_on:
        return None
    keyring = Keyring(settings.keys_path)
    if not keyring.any_valid():
        why = "--auth is on"
        if settings.auth == "auto":
            why = f"the service listens on {settings.host}, which others may reach"
        raise AccessError(
            f"{why}, and {settings.keys_path} holds no valid key: make one with "
            f"`gti keys add NAME --scope admin{_place(settings)}`"
        )
    return keyring


def open_limiter(settings: Settings) -> RateLimiter | None:
    """The rate limit; None where there is none."""
    return RateLimiter(settings.rate_limit) if settings.rate_limit else None


def open_audit(settings: Settings) -> AuditLog:
    """The audit log."""
    return AuditLog(settings.audit_target)


def _place(settings: Settings) -> str:
    if settings.keys_file is not None:
        return f" --keys-file {shlex.quote(str(settings.keys_file))}"
    if settings.data_dir != Settings.model_fields["data_dir"].default:
        return f" --data-dir {shlex.quote(str(settings.data_dir))}"
    return ""
