"""What is wrong with a file in the data folder is reported, and the service goes on."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_store import VOCABULARY, base_state, opened, published

from service.onboarding.states import States
from service.store import Store
from service.store.errors import DamagedStoreError, StoreError
from service.store.standby import Standby


def restored(folder: Path) -> Store:
    return Store(str(folder / "gti.db"), "tiny", "d" * 64, VOCABULARY, restore=True)


def with_two_versions(folder: Path) -> bytes:
    """A closed store that serves version 3, and its copy; the store's bytes."""
    store = opened(folder)
    states = States(store, base_state())
    published(store, states, "a")
    published(store, states, "b")
    assert store.keep_copy()
    store.close()
    return (folder / "gti.db").read_bytes()


@pytest.mark.parametrize("kept", [0, 1, 100, 4096, 5000, 0.5, 0.9])
def test_a_truncated_store_is_replaced_by_its_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: float
) -> None:
    whole = with_two_versions(tmp_path)
    left = whole[: int(kept * len(whole)) if isinstance(kept, float) else kept]
    (tmp_path / "gti.db").write_bytes(left)
    with caplog.at_level(logging.ERROR):
        store = restored(tmp_path)
    assert store.versions.current() == 3
    assert "b" in States(store, base_state()).at(3).catalog
    [aside] = [path for path in tmp_path.iterdir() if ".damaged-" in path.name]
    assert aside.read_bytes() == left
    assert aside.name in caplog.text
    assert published(store, States(store, base_state()), "c") == 4
    store.close()


@pytest.mark.parametrize("content", [b"no database at all, just text" * 50, b"\x00" * 8192])
def test_a_foreign_file_in_its_place_is_put_aside(tmp_path: Path, content: bytes) -> None:
    with_two_versions(tmp_path)
    (tmp_path / "gti.db").write_bytes(content)
    store = restored(tmp_path)
    assert store.versions.current() == 3
    store.close()


def test_pages_overwritten_in_the_middle_are_noticed(tmp_path: Path) -> None:
    whole = with_two_versions(tmp_path)
    (tmp_path / "gti.db").write_bytes(whole[:4096] + b"\xff" * 4096 + whole[8192:])
    store = restored(tmp_path)
    assert store.versions.current() == 3
    store.close()


def test_without_a_copy_the_damage_is_an_error_and_the_file_stays(tmp_path: Path) -> None:
    whole = with_two_versions(tmp_path)
    (tmp_path / "gti.db.copy").unlink()
    (tmp_path / "gti.db").write_bytes(whole[:5000])
    with pytest.raises(DamagedStoreError, match=r"gti\.db.*restore it from a backup"):
        restored(tmp_path)
    assert (tmp_path / "gti.db").read_bytes() == whole[:5000]


def test_a_worker_never_restores(tmp_path: Path) -> None:
    whole = with_two_versions(tmp_path)
    (tmp_path / "gti.db").write_bytes(whole[:5000])
    with pytest.raises(DamagedStoreError):
        opened(tmp_path)
    assert not [path for path in tmp_path.iterdir() if ".damaged-" in path.name]


def test_another_programs_database_is_not_touched(tmp_path: Path) -> None:
    with_two_versions(tmp_path)
    (tmp_path / "gti.db").unlink()
    with sqlite3.connect(tmp_path / "gti.db") as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = (tmp_path / "gti.db").read_bytes()
    with pytest.raises(StoreError, match="another program"):
        restored(tmp_path)
    assert (tmp_path / "gti.db").read_bytes() == before


def test_a_damaged_store_does_not_replace_a_good_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = with_two_versions(tmp_path)
    good = (tmp_path / "gti.db.copy").read_bytes()
    store = opened(tmp_path)
    (tmp_path / "gti.db").write_bytes(whole[:4096] + b"\xff" * 4096 + whole[8192:])
    store.keep_copy()
    assert (tmp_path / "gti.db.copy").read_bytes() == good
    assert "can't be copied" in caplog.text
    store.close()


@pytest.mark.parametrize("url", ["gti.db", "sqlite:///gti.db"])
def test_a_store_beside_the_working_folder_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(url, "tiny", "d" * 64, VOCABULARY, restore=True)
    assert store.keep_copy()
    assert (tmp_path / "gti.db.copy").is_file()
    store.close()


def test_processes_of_one_store_do_not_spoil_each_others_copy(tmp_path: Path) -> None:
    with_two_versions(tmp_path)
    standbys = [Standby(tmp_path / "gti.db") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(Standby.refresh, standbys))
    with sqlite3.connect(tmp_path / "gti.db.copy") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT current FROM head").fetchone() == (3,)
    connection.close()


def test_two_that_start_on_a_damaged_store_restore_it_once(tmp_path: Path) -> None:
    whole = with_two_versions(tmp_path)
    (tmp_path / "gti.db").write_bytes(whole[:5000])
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(lambda _: restored(tmp_path), range(4)))
    assert published(stores[0], States(stores[0], base_state()), "c") == 4
    assert [store.versions.current() for store in stores] == [4, 4, 4, 4]
    # Its log may lie beside it, under the same new name.
    aside = {path.name.split("-")[1] for path in tmp_path.glob("*.damaged-*")}
    assert len(aside) == 1
    for store in stores:
        store.close()
    assert current_of(tmp_path) == 4


def current_of(folder: Path) -> int | None:
    """The version in a store that is opened again, with no copy to fall back on."""
    (folder / "gti.db.copy").unlink()
    store = restored(folder)
    try:
        return store.versions.current()
    finally:
        store.close()


def test_copying_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.keep_copy()
    assert not store.keep_copy()
    store.close()


def test_left_over_files_do_no_harm(tmp_path: Path) -> None:
    with_two_versions(tmp_path)
    for name in ("gti.db.copy.partial", "gti.db.restoring", "something.tmp", "foreign.safetensors"):
        (tmp_path / name).write_bytes(b"half of someth")
    store = restored(tmp_path)
    assert store.versions.current() == 3
    assert store.keep_copy()
    store.close()


def test_a_log_cut_anywhere_leaves_a_committed_version(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    store = opened(live)
    states = States(store, base_state())
    published(store, states, "a")
    published(store, states, "b")
    log = (live / "gti.db-wal").read_bytes()
    assert len(log) > 10_000
    seen = set()
    for number in range(25):
        crashed = tmp_path / f"crashed-{number}"
        crashed.mkdir()
        shutil.copyfile(live / "gti.db", crashed / "gti.db")
        (crashed / "gti.db-wal").write_bytes(log[: len(log) * number // 24])
        again = restored(crashed)
        seen.add(again.versions.current())
        States(again, base_state()).at(again.versions.current())
        again.close()
    store.close()
    assert {1, 2, 3} <= seen
