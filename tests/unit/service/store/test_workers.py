"""Who grounds: what workers say of themselves, and what is believed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_store import opened

from service.onboarding.worker_process import presence
from service.store import Store
from service.store import workers as module
from service.store.workers import WorkerCounts


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = opened(tmp_path)
    yield store
    store.close()


def test_workers_are_counted_by_what_they_do(store: Store) -> None:
    assert store.workers.counts() == WorkerCounts(0, 0)
    store.workers.beat("a", ready=False)
    store.workers.beat("b", ready=True)
    assert store.workers.counts() == WorkerCounts(ready=1, starting=1)
    store.workers.beat("a", ready=True)
    assert store.workers.counts() == WorkerCounts(ready=2, starting=0)
    store.workers.leave("b")
    store.workers.leave("b")
    assert store.workers.counts() == WorkerCounts(ready=1, starting=0)


def test_a_silent_worker_is_gone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.workers.beat("a", ready=True)
    later = time.time() + module.FRESH_S + 1
    monkeypatch.setattr(module, "now", lambda: later)
    assert store.workers.counts() == WorkerCounts(0, 0)
    store.workers.beat("a", ready=True)
    assert store.workers.counts() == WorkerCounts(1, 0)


def wait_for(store: Store, expected: WorkerCounts) -> None:
    for _ in range(200):
        if store.workers.counts() == expected:
            return
        time.sleep(0.02)
    raise AssertionError(store.workers.counts())


def test_a_worker_is_there_while_it_works(store: Store) -> None:
    with presence(store, "a", every_s=60) as ready:
        wait_for(store, WorkerCounts(0, 1))
        ready()
        wait_for(store, WorkerCounts(1, 0))
    assert store.workers.counts() == WorkerCounts(0, 0)


def test_a_worker_that_fails_is_gone_too(store: Store) -> None:
    with pytest.raises(SystemExit), presence(store, "a"):
        raise SystemExit(0)
    assert store.workers.counts() == WorkerCounts(0, 0)


def test_a_store_that_breaks_does_not_end_the_worker(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with presence(store, "a", every_s=0.02) as ready:
        wait_for(store, WorkerCounts(0, 1))
        store.close()
        file = tmp_path / "gti.db"
        whole = file.read_bytes()
        file.write_bytes(b"broken" * 2000)
        time.sleep(0.2)
        file.write_bytes(whole)
        ready()
    assert caplog.text.count("can't be told") <= 2
