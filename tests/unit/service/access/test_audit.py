"""The audit log's file."""

from __future__ import annotations

import json
import logging
import stat
import sys
from pathlib import Path

import pytest

from service.access import audit as module
from service.access.audit import AuditError, AuditLog

KEY = "gti_0123abcd_" + "s" * 43


def written(log: AuditLog, *entries: dict[str, object]) -> None:
    log.start()
    for entry in entries:
        log.write(entry)
    log.stop()


def lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_entries_are_lines_and_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "audit.jsonl"
    entries: list[dict[str, object]] = [{"n": 1}, {"text": "100 %s\nforged é \ud800"}]
    written(AuditLog(str(path)), entries[0])
    written(AuditLog(str(path)), entries[1])
    assert lines(path) == entries
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_secret_is_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(AuditLog(str(path)), {"item_id": KEY})
    assert lines(path) == [{"item_id": "gti_0123abcd_***"}]


def test_it_is_rotated_by_size(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(str(path), max_bytes=100, kept_files=2)
    written(log, *({"n": number, "x": "y" * 30} for number in range(10)))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "audit.jsonl",
        "audit.jsonl.1",
        "audit.jsonl.2",
    ]
    assert all(file.stat().st_size <= 100 for file in tmp_path.iterdir())
    assert [entry["n"] for entry in lines(path)][-1] == 9  # type: ignore[index]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = AuditLog("")
    log.check()
    written(log, {"n": 1})
    assert list(tmp_path.iterdir()) == []


def test_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = AuditLog("-")
    log.check()
    written(log, {"n": 1})
    assert capsys.readouterr().err == '{"n": 1}\n'
    assert not sys.stderr.closed


def test_nothing_is_made_before_the_first_entry(tmp_path: Path) -> None:
    written(AuditLog(str(tmp_path / "audit.jsonl")))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "audit.jsonl"):
        with pytest.raises(AuditError, match="--audit-log") as caught:
            AuditLog(str(path)).check()
        assert str(path) in str(caught.value)
    AuditLog(str(tmp_path / "audit.jsonl")).check()


def test_what_cannot_be_written_stands_in_the_service_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        written(AuditLog(str(tmp_path)), {"n": 1})
    [record] = caplog.records
    assert '{"n": 1}' in record.getMessage()
    assert "Is a directory" in record.getMessage()


def test_a_flood_does_not_grow_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 3)
    log = AuditLog(str(tmp_path / "audit.jsonl"))
    for number in range(5):
        log.write({"n": number})
    assert log._waiting.qsize() == 3
    assert ['{"n": 3}' in caplog.text, '{"n": 4}' in caplog.text] == [True, True]
    log.start()
    log.stop()
    assert lines(tmp_path / "audit.jsonl") == [{"n": 0}, {"n": 1}, {"n": 2}]
