"""The keyring: verdicts, and following the file."""

from __future__ import annotations

import asyncio
import hmac
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service.access import keyring as module
from service.access.keyfile import add_key, revoke_key
from service.access.keyring import Keyring
from service.access.keys import KeysError

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def keyring(file: Path, now: datetime = NOW) -> Keyring:
    return Keyring(file, interval_s=0, now=lambda: now)


def refresh(ring: Keyring) -> None:
    asyncio.run(ring.refresh())


def test_verdicts(file: Path) -> None:
    good, _ = add_key(file, "good", "read", NOW)
    old, _ = add_key(file, "old", "read", NOW, NOW + timedelta(days=1))
    gone, record = add_key(file, "gone", "read", NOW)
    revoke_key(file, record.id, NOW)
    ring = keyring(file)
    assert [ring.verify(key).state for key in (good, old, gone)] == ["valid", "valid", "revoked"]
    later = keyring(file, NOW + timedelta(days=1))
    assert [later.verify(key).state for key in (good, old, gone)] == ["valid", "expired", "revoked"]
    wrong = good[:-1] + ("A" if good[-1] != "A" else "B")
    unknown = "gti_00000000_" + "x" * 43
    for text in (wrong, unknown):
        assert (ring.verify(text).state, ring.verify(text).record) == ("unknown", None)
    # Another key's id with this one's secret.
    mixed = f"gti_{old.split('_')[1]}_{good.split('_', 2)[2]}"
    assert ring.verify(mixed).state == "unknown"
    assert ring.verify("nonsense").state == "malformed"


def test_hashes_are_compared_in_constant_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown id costs a comparison too, so that its answer takes no less time."""
    good, record = add_key(file, "good", "read", NOW)
    ring = keyring(file)
    compared: list[str] = []
    compare = hmac.compare_digest

    def spy(left: str, right: str) -> bool:
        compared.append(left)
        return compare(left, right)

    monkeypatch.setattr(module.hmac, "compare_digest", spy)
    assert ring.verify(good).state == "valid"
    assert compared == [record.sha256]
    assert ring.verify("gti_00000000_" + "x" * 43).state == "unknown"
    assert len(compared) == 2


def test_the_empty_key_is_not_the_stand_in(file: Path) -> None:
    """What unknown ids are compared with matches nothing that has a key's form."""
    assert keyring(file).verify("").state == "malformed"
    assert not keyring(file).any_valid()


def test_a_changed_file_is_taken_over(file: Path) -> None:
    ring = keyring(file)
    key, record = add_key(file, "late", "read", NOW)
    assert ring.verify(key).state == "unknown"
    refresh(ring)
    assert ring.verify(key).state == "valid"
    assert ring.any_valid()
    revoke_key(file, record.id, NOW)
    refresh(ring)
    assert ring.verify(key).state == "revoked"
    assert not ring.any_valid()


def test_it_looks_at_most_once_per_interval(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = Keyring._look

    def count(ring: Keyring) -> None:
        nonlocal looks
        looks += 1
        look(ring)

    monkeypatch.setattr(Keyring, "_look", count)
    ring = Keyring(file, interval_s=60)
    for waited_s, expected in ((0, 0), (59, 0), (1, 1), (59, 1), (1, 2), (0, 2)):
        ring._looked -= waited_s
        refresh(ring)
        assert looks == expected


@pytest.mark.parametrize("damage", [b"", b"{", None])
def test_a_damaged_file_leaves_the_last_good_keys(
    file: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    key, record = add_key(file, "good", "read", NOW)
    good = file.read_bytes()
    ring = keyring(file)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            refresh(ring)
    assert ring.verify(key).state == "valid"
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "the last good keys stay in force" in line
    assert str(file) in line
    file.write_bytes(good)
    revoke_key(file, record.id, NOW)
    refresh(ring)
    assert ring.verify(key).state == "revoked"


def test_a_damaged_file_at_the_start(file: Path) -> None:
    file.write_text("{")
    with pytest.raises(KeysError, match="is no keys file"):
        keyring(file)
