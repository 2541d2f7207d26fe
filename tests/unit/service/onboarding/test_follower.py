"""The follower: the engine gets what the store says is current."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_grounder import delta_for

from gti_core.bundle.delta import CatalogState, Delta, Rows
from gti_core.data.dataset import ItemText
from service.context import ServingContext
from service.engine.base import (
    CatalogChange,
    EngineDeadError,
    EngineError,
    ServingModel,
)
from service.engine.fake import FakeEngine
from service.onboarding.admin import Admin
from service.onboarding.follower import Follower
from service.onboarding.states import States
from service.store import Store
from service.store.errors import UnknownItemError
from service.store.submission import Submission

POLL_S = 0.02


class SpyEngine(FakeEngine):
    """Keeps what it was given, and refuses the versions it is told to."""

    def __init__(self, model: ServingModel) -> None:
        super().__init__(model)
        self.published: list[tuple[int, list[int], CatalogChange | None]] = []
        self.refused: set[int] = set()

    async def publish(
        self,
        model: ServingModel,
        *,
        rows: Rows | None = None,
        change: CatalogChange | None = None,
    ) -> None:
        if model.version in self.refused:
            raise EngineError("no room")
        await super().publish(model, rows=rows, change=change)
        numbers = [] if rows is None else rows.numbers.tolist()
        self.published.append((model.version, numbers, change))


class Setup:
    """A store, an engine and what is between them."""

    def __init__(self, folder: Path, context: ServingContext) -> None:
        self.store = Store(str(folder / "gti.db"), context.name, context.digest, context.vocabulary)
        self.states = States(
            self.store, CatalogState(context.catalog, context.vocabulary, context.index)
        )
        self.model = context.model(Path("unused"))
        self.restart()

    def restart(self) -> None:
        """A new process with the same store."""
        self.engine = SpyEngine(self.model)
        self.follower = Follower(self.store, self.states, self.engine, poll_s=POLL_S)
        self.admin = Admin(self.store, self.states, self.follower)

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.engine.start()
            await self.follower.start()
            try:
                await work()
            finally:
                await self.follower.stop()

        asyncio.run(whole())

    def onboard(self, *ids: str) -> int:
        """Commit a version with new items, as a worker in another process does."""
        current = self.store.versions.current()
        submission = Submission(tuple(ItemText(name, f"New {name}") for name in ids))
        self.store.jobs.submit(submission, current, {})
        claim = self.store.jobs.claim("w", 60)
        assert claim is not None
        delta = delta_for(self.states.at(current), claim.items, claim.first_code)
        return self.store.versions.commit(current, "onboard", delta, claim=claim)


@pytest.fixture
def setup(tmp_path: Path, tiny_context: ServingContext) -> Iterator[Setup]:
    setup = Setup(tmp_path, tiny_context)
    yield setup
    setup.store.close()


def state_of_job(setup: Setup) -> str:
    return setup.store.jobs.page(1)[0].state


def test_a_commit_elsewhere_is_served_soon_and_its_job_is_live(setup: Setup) -> None:
    async def work() -> None:
        number = await asyncio.to_thread(setup.onboard, "n")
        assert await setup.follower.wait_for(number, 5) == number
        await setup.follower.sync()

    setup.run(work)
    [(version, rows, change)] = setup.engine.published
    # Level offsets 0, 5, 9; four codes of the last level are active before.
    assert (version, rows) == (2, [13])
    assert change is not None
    assert change.parent == 1
    assert change.added.tolist() == [[0, 0, 4]]
    assert change.added_available.tolist() == [True]
    assert state_of_job(setup) == "live"


def test_a_restart_serves_the_current_version_with_its_rows(setup: Setup) -> None:
    setup.onboard("n")
    setup.onboard("m")

    async def work() -> None:
        assert setup.engine.model.version == 3

    setup.run(work)
    assert setup.engine.published[0][:2] == (3, [13, 14])
    assert state_of_job(setup) == "live"
    setup.restart()
    setup.run(work)
    assert setup.engine.published[0][:2] == (3, [13, 14])


def test_rows_are_written_once(setup: Setup) -> None:
    async def work() -> None:
        await asyncio.to_thread(setup.onboard, "n")
        await setup.follower.sync()
        await setup.admin.activate(1)
        await setup.admin.activate(2)

    setup.run(work)
    assert [(version, rows) for version, rows, _ in setup.engine.published] == [
        (2, [13]),
        (1, []),
        (2, []),
    ]
    assert setup.engine.published[1][2] is None  # the base does not descend from version 2


def test_a_change_says_what_goes_and_what_comes(setup: Setup) -> None:
    async def work() -> None:
        await setup.admin.change("a2", available=False)
        await setup.admin.change("a2", available=True)

    setup.run(work)
    (_, _, retired), (_, _, restored) = setup.engine.published
    assert retired is not None
    assert restored is not None
    assert (retired.retired, retired.restored) == ((1,), ())
    assert (restored.retired, restored.restored) == ((), (1,))
    assert restored.added.shape == (0, 3)


def test_a_refused_version_is_turned_back_from(setup: Setup) -> None:
    setup.engine.refused = {2}

    async def work() -> None:
        await asyncio.to_thread(setup.onboard, "n")
        await setup.follower.sync()
        assert setup.engine.model.version == 1

    setup.run(work)
    assert setup.store.versions.current() == 1
    assert state_of_job(setup) == "failed"


def test_a_version_refused_at_the_start_that_was_never_served(setup: Setup) -> None:
    setup.onboard("n")
    setup.engine.refused = {2}

    async def work() -> None:
        assert setup.engine.model.version == 1

    setup.run(work)
    assert state_of_job(setup) == "failed"


def test_a_version_refused_at_the_start_that_was_served_ends_it(setup: Setup) -> None:
    async def nothing() -> None:
        pass

    setup.onboard("n")
    setup.run(nothing)
    setup.restart()
    setup.engine.refused = {2}
    with pytest.raises(EngineError, match="no room"):
        setup.run(nothing)
    assert setup.store.versions.current() == 2


def test_a_rollback_that_is_refused_leaves_what_is_served(setup: Setup) -> None:
    async def work() -> None:
        await setup.admin.change("a1", available=False)
        await setup.admin.change("a2", available=False)
        setup.engine.refused = {2}
        with pytest.raises(EngineError):
            await setup.admin.activate(2)
        assert setup.engine.model.version == 3

    setup.run(work)
    assert setup.store.versions.current() == 3
    assert setup.store.versions.get(2).refused is None


def test_a_dead_engine_leaves_the_store_alone(setup: Setup) -> None:
    async def work() -> None:
        setup.engine.kill()
        with pytest.raises(EngineDeadError):
            await setup.admin.change("a1", available=False)

    setup.run(work)
    assert setup.store.versions.current() == 2
    assert setup.store.versions.get(2).refused is None


def test_changes_at_the_same_time_all_arrive(setup: Setup) -> None:
    async def work() -> None:
        names = ("a1", "a2", "a3", "b1", "b2")
        changes = [setup.admin.change(name, available=False) for name in names]
        states = await asyncio.gather(*changes)
        assert sorted(state.version for state in states) == [2, 3, 4, 5, 6]
        await setup.follower.sync()

    setup.run(work)
    assert np.flatnonzero(~setup.engine.model.index.available).tolist() == [0, 1, 2, 3, 4]


def test_an_unknown_item_makes_no_version(setup: Setup) -> None:
    async def work() -> None:
        with pytest.raises(UnknownItemError):
            await setup.admin.change("nope", available=False)

    setup.run(work)
    assert setup.store.versions.current() == 1


def test_waiting_for_a_version_that_does_not_come(setup: Setup) -> None:
    async def work() -> None:
        assert await setup.follower.wait_for(2, 0.03) == 1

    setup.run(work)


def test_an_unfit_delta_in_the_store_is_turned_back_from(setup: Setup) -> None:
    setup.store.versions.commit(1, "retire", Delta(setup.model.vocabulary, retired=("nope",)))

    async def work() -> None:
        assert setup.engine.model.version == 1

    setup.run(work)
    assert setup.store.versions.current() == 1
