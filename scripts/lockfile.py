"""What set-up and ``make lock`` know about lock files and about pip's answers. No side effects.

Standard library only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FORMAT = 1

# What pip says when no index has the version; the list in brackets is what it did find.
NOT_FOUND = re.compile(
    r"Could not find a version that satisfies the requirement (?P<name>[A-Za-z0-9._-]+)"
    r".*\(from versions: (?P<versions>[^)]*)\)"
)
# What pip says when an index could not be asked at all; it then ends in the same "not found".
NETWORK_TROUBLE = re.compile(
    r"connection broken by|Could not fetch URL|NewConnectionError|ConnectTimeout|ReadTimeout|"
    r"Temporary failure in name resolution|Max retries exceeded|SSLError|ProxyError"
)


class SetupError(Exception):
    """Set-up can't go on; the message is for a person."""


@dataclass(frozen=True)
class LockEntry:
    """One package of a lock: its normalized name, version, hashes and text as pip reads it."""

    name: str
    version: str
    hashes: tuple[str, ...]
    text: str


def normalize(name: str) -> str:
    """Package name as PyPA normalizes it: lower case, runs of ``-_.`` become one hyphen."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str) -> dict[str, LockEntry]:
    """Entries of a lock by normalized name.

    Raises:
        SetupError: a line is no exact pin, or a package is there twice.
    """
    entries: dict[str, LockEntry] = {}
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for logical in "\n".join(lines).replace("\\\n", " ").splitlines():
        words = logical.split()
        if not words:
            continue
        pin = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!_-]+)", words[0])
        if pin is None or any(not word.startswith("--hash=") for word in words[1:]):
            raise SetupError(f"lock: not an exact pin with hashes: {logical.strip()!r}")
        name = normalize(pin[1])
        if name in entries:
            raise SetupError(f"lock: {name} is listed twice")
        hashes = tuple(word.removeprefix("--hash=") for word in words[1:])
        entries[name] = LockEntry(name, pin[2], hashes, " ".join(words))
    return entries


def merge_locks(texts: dict[str, str]) -> dict[str, LockEntry]:
    """Entries of several locks together; ``texts`` maps a lock's name to its text.

    Raises:
        SetupError: two locks pin one package to different versions.
    """
    merged: dict[str, LockEntry] = {}
    for lock, text in texts.items():
        for name, entry in parse_lock(text).items():
            other = merged.setdefault(name, entry)
            if other.version != entry.version:
                raise SetupError(f"{lock}: {name}=={entry.version}, elsewhere {other.version}")
    return merged


def digest(parts: dict[str, bytes]) -> str:
    """SHA-256 in hex over names and contents, in the order of the names."""
    total = hashlib.sha256(str(FORMAT).encode())
    for name in sorted(parts):
        for piece in (name.encode(), parts[name]):
            total.update(len(piece).to_bytes(8, "big") + piece)
    return total.hexdigest()


def may_ask_second_index(output: str, name: str) -> bool:
    """Whether a failed pip call means "``name`` is in that version on none of the indexes".

    True only where pip reports that very package as not found, and either saw other versions of
    it or had no trouble reaching an index. An unreachable index is not an answer.
    """
    for found in NOT_FOUND.finditer(output):
        if normalize(found["name"]) == normalize(name):
            seen = found["versions"].strip() not in ("", "none")
            return seen or NETWORK_TROUBLE.search(output) is None
    return False
