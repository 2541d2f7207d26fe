"""The keys file: what stands in it, how it is replaced, what is refused."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from service.access.keyfile import add_key, read_keys, revoke_key
from service.access.keys import KeysError

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data" / "keys.json"


def test_no_file_no_keys(file: Path) -> None:
    assert read_keys(file) == ()
    with pytest.raises(KeysError, match="can't be read"):
        read_keys(file, must_exist=True)


def test_what_was_added_is_read(file: Path) -> None:
    key, record = add_key(file, "Shop", "read", NOW)
    _, other = add_key(file, "Import", "admin", NOW, datetime(2027, 1, 1, tzinfo=UTC))
    assert read_keys(file) == (record, other)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["keys.json"]  # noqa: PTH208
    content = file.read_text()
    assert key not in content
    assert key.rsplit("_", 1)[1] not in content
    assert json.loads(content)["format"] == "gti-keys/1"


def test_a_revoked_key_stays_listed(file: Path) -> None:
    _, record = add_key(file, "Shop", "read", NOW)
    _, other = add_key(file, "Other", "read", NOW)
    assert revoke_key(file, record.id, NOW).revoked == NOW
    later = datetime(2027, 1, 1, tzinfo=UTC)
    assert revoke_key(file, record.id, later).revoked == NOW
    assert [kept.state(NOW) for kept in read_keys(file)] == ["revoked", "valid"]
    assert read_keys(file)[1] == other


def test_an_id_that_is_not_there_is_not_repeated(file: Path) -> None:
    key, _ = add_key(file, "Shop", "read", NOW)
    with pytest.raises(KeysError, match="no key has this id") as caught:
        revoke_key(file, key, NOW)
    assert key not in str(caught.value)


def test_revoking_makes_no_folder(file: Path) -> None:
    with pytest.raises(KeysError):
        revoke_key(file, "0123abcd", NOW)
    assert not file.parent.exists()


def test_two_at_a_time_lose_nothing(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: add_key(file, f"k{n}", "read", NOW)[1].id, range(24)))
    assert {record.id for record in read_keys(file)} == set(made)


def test_a_crash_while_writing_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, record = add_key(file, "Shop", "read", NOW)

    def crash(_: int) -> None:
        raise OSError("disk")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeysError, match="can't be written: disk"):
        add_key(file, "Other", "read", NOW)
    assert read_keys(file) == (record,)
    assert os.listdir(file.parent) == ["keys.json"]  # noqa: PTH208


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    target = tmp_path / "mounted.json"
    add_key(target, "Shop", "read", NOW)
    file.symlink_to(target)
    add_key(file, "Other", "read", NOW)
    assert file.is_symlink()
    assert len(read_keys(target)) == 2


GOOD: dict[str, Any] = {
    "id": "0123abcd",
    "name": "Shop",
    "scope": "read",
    "created": "2026-12-01T12:00:00Z",
    "expires": None,
    "revoked": None,
    "sha256": "a" * 64,
}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": "gti-keys/2", "keys": []}',
        '{"format": "gti-keys/1"}',
        *(
            json.dumps({"format": "gti-keys/1", "keys": [GOOD | change]})
            for change in (
                {"id": "short"},
                {"id": "0123abcd\n"},
                {"scope": "root"},
                {"created": "yesterday"},
                {"created": "2026-12-01T12:00:00"},
                {"expires": "never"},
                {"sha256": "SECRETSECRET"},
                {"name": "\x1b[31m"},
                {"secret": "SECRETSECRET"},
            )
        ),
        json.dumps({"format": "gti-keys/1", "keys": [GOOD, GOOD]}),
    ],
)
def test_a_damaged_file_is_named_but_not_quoted(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(KeysError, match="is no keys file") as caught:
        read_keys(file)
    assert str(file) in str(caught.value)
    assert "SECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)
    # Nor is it written over.
    with pytest.raises(KeysError):
        add_key(file, "Shop", "read", NOW)
    assert file.read_text() == content


def test_a_good_file_by_hand(file: Path) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps({"format": "gti-keys/1", "keys": [GOOD]}))
    assert read_keys(file)[0].name == "Shop"


def test_bytes_that_are_no_text_and_a_folder(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KeysError, match="is no keys file"):
        read_keys(file)
    file.unlink()
    file.mkdir()
    with pytest.raises(KeysError, match="can't be read"):
        read_keys(file)
