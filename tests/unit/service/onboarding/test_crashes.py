"""kill -9 at every named point: the store holds the old version or the new one, no job is lost.

``CRASH_HITS=20`` kills at every point twenty times.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_grounder import FakeGrounder

from gti_core.bundle.delta import CatalogState
from gti_core.catalog import Item, ItemCatalog
from gti_core.data.dataset import ItemText
from gti_core.vocabulary import SidVocabulary
from service.engine.base import ServingModel
from service.engine.fake import FakeEngine
from service.onboarding.admin import Admin
from service.onboarding.faults import POINTS, VARIABLE
from service.onboarding.follower import Follower
from service.onboarding.states import States
from service.onboarding.worker import Worker
from service.store import Store
from service.store.submission import Submission

HITS = int(os.environ.get("CRASH_HITS", "2"))
IN_SWAP = ("before_swap", "after_swap")
IN_COMMIT = ("before_commit", "after_commit")
VOCABULARY = SidVocabulary((3, 2, 200), (3, 2, 4), 100)


def base_state() -> CatalogState:
    items = [Item(f"i{n}", (n % 3, n // 3 % 2, n // 6), f"Title {n}") for n in range(24)]
    return CatalogState.of(ItemCatalog(items), VOCABULARY)


class Machine:
    """Processes on one store; each opens it anew, as after a restart."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "gti.db")
        self.open().close()

    def open(self) -> Store:
        return Store(self.url, "tiny", "d" * 64, VOCABULARY)

    def killed(self, point: str, work: Callable[[Store], None]) -> bool:
        """Run in a process of its own; whether it was killed at the point."""
        child = os.fork()
        if child == 0:
            try:
                os.environ[VARIABLE] = point
                work(self.open())
                os._exit(0)
            except BaseException:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        return os.WIFSIGNALED(status)

    def work(self, store: Store) -> None:
        """One job, as the worker does it."""
        Worker(store, States(store, base_state()), FakeGrounder(), "w").step()

    def serve(self, store: Store, change: str | None = None) -> tuple[int, list[str]]:
        """Start, perhaps retire an item, and tell the version and the items in service."""
        base = base_state()
        states = States(store, base)
        model = ServingModel(Path("unused"), VOCABULARY, base.catalog, base.index, 100)

        async def run() -> FakeEngine:
            engine = FakeEngine(model)
            await engine.start()
            follower = Follower(store, states, engine)
            await follower.start()
            if change is not None:
                await Admin(store, states, follower).change(change, available=False)
            await follower.stop()
            return engine

        served = asyncio.run(run()).model
        return served.version, [item.item_id for item in served.popular]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def store(machine: Machine) -> Iterator[Store]:
    store = machine.open()
    yield store
    store.close()


@pytest.mark.parametrize("point", [point for point in POINTS if point not in IN_SWAP])
def test_a_worker_killed_at_any_point_loses_no_job(machine: Machine, point: str) -> None:
    for hit in range(HITS):
        store = machine.open()
        before = store.versions.current()
        items = tuple(
            ItemText(f"n{hit}-{number}", f"New {number}") for number in range(1 + hit % 3)
        )
        job_id = store.jobs.submit(Submission(items), before, {})[0].job_id
        store.close()
        assert machine.killed(point, machine.work)
        store = machine.open()
        after = store.versions.current()
        assert after == (before + 1 if point == "after_commit" else before)
        store.jobs.abandon("w")  # as the supervisor does when it sees the worker's end
        machine.work(store)
        version, served = machine.serve(store)
        job = store.jobs.get(job_id)
        assert (job.state, job.version, version) == ("live", before + 1, before + 1)
        assert all(served.count(item.item_id) == 1 for item in items)
        assert len(served) == len(set(served))
        assert job.attempts == (1 if point == "after_commit" else 2)
        store.close()


@pytest.mark.parametrize("point", IN_SWAP)
def test_a_service_killed_in_a_swap_serves_the_new_version_after_it(
    machine: Machine, point: str
) -> None:
    for hit in range(HITS):
        store = machine.open()
        items = (ItemText(f"n{hit}", "New"),)
        job_id = store.jobs.submit(Submission(items), store.versions.current(), {})[0].job_id
        machine.work(store)
        committed = store.versions.current()
        store.close()
        assert machine.killed(point, lambda store: void(machine.serve(store)))
        store = machine.open()
        assert store.jobs.get(job_id).state == "publishing"
        version, served = machine.serve(store)
        assert (version, store.jobs.get(job_id).state) == (committed, "live")
        assert f"n{hit}" in served
        store.close()


@pytest.mark.parametrize("point", [*IN_COMMIT, *IN_SWAP])
def test_a_service_killed_while_it_retires_an_item(machine: Machine, point: str) -> None:
    for hit in range(HITS):
        name = f"i{hit}"
        store = machine.open()
        before = store.versions.current()
        store.close()
        # The swap at the start, up to the version before, is not the one meant.
        at = point if point in IN_COMMIT or before == 1 else f"{point}:2"
        assert machine.killed(at, lambda store, name=name: void(machine.serve(store, name)))
        store = machine.open()
        version, served = machine.serve(store)
        if point == "before_commit":
            assert (version, name in served) == (before, True)
        else:
            assert (version, name in served) == (before + 1, False)
        assert machine.serve(store, name)[0] == before + 1
        store.close()


def test_a_job_that_kills_every_worker_has_failed_and_the_next_goes_on(
    machine: Machine, store: Store
) -> None:
    bad = store.jobs.submit(Submission((ItemText("n", "New"),)), 1, {})[0].job_id
    good = store.jobs.submit(Submission((ItemText("m", "New"),)), 1, {})[0].job_id
    for _ in range(3):
        assert machine.killed("grounding", machine.work)
        store.jobs.abandon("w")
    machine.work(store)
    assert store.jobs.get(bad).state == "failed"
    assert store.jobs.get(good).state == "publishing"


def void(_: object) -> None:
    """Drop a result."""
