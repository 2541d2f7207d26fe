"""Versions on the service's side of the vLLM engine, with a worker that has no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gti_core.bundle.delta import Rows
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex, ScoredRow
from gti_core.vocabulary import SidVocabulary
from service.engine.base import (
    CatalogChange,
    DecodeRequest,
    EngineDeadError,
    EngineError,
    Selection,
    ServingModel,
)
from service.engine.held_selections import HELD_SELECTIONS, HeldSelections
from service.engine.vllm_beams.snapshot import Snapshot
from service.engine.vllm_engine import VllmEngine

CPU = torch.device("cpu")


class StubWorker:
    """Keeps snapshots as the real worker does; fails, waits or dies as told."""

    def __init__(self) -> None:
        self.errored = False
        self.calls: list[str] = []
        self.snapshots: dict[int, Snapshot] = {}
        self.selected: list[tuple[int, str]] = []
        self.fails_at = ""
        self.hangs_at = ""
        self.reached = asyncio.Event()
        """Set when the method that hangs is called."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        if method == self.hangs_at:
            self.reached.set()
            await asyncio.Event().wait()
        if method == self.fails_at:
            raise RuntimeError("out of order")
        await asyncio.sleep(0)
        return [getattr(self, method)(*args)]

    def gti_install(self, path: str) -> list[int]:
        snapshot = Snapshot.load(Path(path), CPU)
        self.snapshots[snapshot.version] = snapshot
        return snapshot.counts

    def gti_follow(
        self,
        version: int,
        parent: int,
        vocabulary: str,
        added: bytes,
        bits: bytes,
        *rows: list[int],
    ) -> list[int]:
        before = self.snapshots[parent]
        sids = np.frombuffer(added, np.int32).reshape(-1, before.levels)
        available = np.frombuffer(bits, np.bool_)
        parsed = SidVocabulary.from_json(json.loads(vocabulary))
        self.snapshots[version] = before.followed(version, parsed, sids, available, *rows)
        return self.snapshots[version].counts

    def gti_discard(self, version: int) -> None:
        self.snapshots.pop(version, None)

    def gti_write_rows(self, numbers: list[int], rows_in: bytes, rows_out: bytes | None) -> None:
        assert len(rows_in) == 4 * 2 * len(numbers)

    def gti_select(self, version: int, key: str, packed: bytes) -> None:
        self.selected.append((version, key))

    def gti_unselect(self, version: int, keys: list[str]) -> None:
        self.selected = [one for one in self.selected if one not in [(version, k) for k in keys]]


class StubEngine(VllmEngine):
    """A started engine over a stub worker. A request answers when ``go`` is set."""

    def __init__(self, model: ServingModel) -> None:
        super().__init__(model)
        self.worker = self._llm = StubWorker()
        self._max_model_len, self._vocab_size = model.max_tokens, 999
        self.go = asyncio.Event()
        self.entered = 0

    async def _ask(self, llm: Any, request: DecodeRequest) -> list[ScoredRow]:
        self.entered += 1
        assert request.model.version in self.worker.snapshots
        await self.go.wait()
        assert request.model.version in self.worker.snapshots
        return [ScoredRow(request.model.version, (), 0.0)]

    async def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(50):
            await asyncio.sleep(0)


@pytest.fixture
def model(tmp_path: Path) -> ServingModel:
    catalog = ItemCatalog([Item("a", (0, 0)), Item("b", (0, 1)), Item("c", (1, 0))])
    vocabulary = SidVocabulary((3, 4), (2, 2), first_token_id=100)
    return ServingModel(tmp_path, vocabulary, catalog, ConstraintIndex(catalog.sids), 20)


def following(model: ServingModel, sid: tuple[int, int]) -> tuple[ServingModel, CatalogChange]:
    catalog = ItemCatalog([*model.catalog.items, Item(f"{sid}", sid)])
    index = ConstraintIndex(catalog.sids, np.append(model.index.available, True))
    change = CatalogChange(model.version, np.array([sid], np.int32), np.ones(1, np.bool_))
    return replace(model, catalog=catalog, index=index, version=model.version + 1), change


def run(model: ServingModel, work: Callable[[StubEngine], Awaitable[None]]) -> None:
    async def scenario() -> None:
        engine = StubEngine(model)
        await engine._install(engine.worker, model, None)
        await work(engine)

    asyncio.run(scenario())


ROWS = Rows(np.array([6]), np.ones((1, 2), np.float32))


def test_a_request_keeps_its_version_and_its_version_is_kept_for_it(model: ServingModel) -> None:
    second, to_second = following(model, (1, 1))
    third, to_third = following(second, (1, 2))

    async def work(engine: StubEngine) -> None:
        old = asyncio.create_task(engine.decode(DecodeRequest(model, "old", [7], 1, 1)))
        await engine.settle()
        await engine.publish(second, rows=ROWS, change=to_second)
        await engine.publish(third, change=to_third)
        await engine.settle()
        assert engine.model is third
        # The first is in use, the second is the way back.
        assert set(engine.worker.snapshots) == {1, 2, 3}
        engine.go.set()
        assert (await old)[0].row == 1
        await engine.settle()
        assert set(engine.worker.snapshots) == {2, 3}
        with pytest.raises(EngineError, match="version 1 is not served any more"):
            await engine.decode(DecodeRequest(model, "late", [7], 1, 1))
        assert engine.worker.calls == [
            "gti_install", "gti_write_rows", "gti_follow", "gti_follow", "gti_discard",
        ]  # fmt: skip

    run(model, work)


def test_a_request_that_is_cancelled_lets_its_version_go(model: ServingModel) -> None:
    second, to_second = following(model, (1, 1))
    third, to_third = following(second, (1, 2))

    async def work(engine: StubEngine) -> None:
        old = asyncio.create_task(engine.decode(DecodeRequest(model, "old", [7], 1, 1)))
        # Cancelled before its first step in the engine, it must not be counted for ever.
        await asyncio.sleep(0)
        await engine.publish(second, change=to_second)
        await engine.publish(third, change=to_third)
        old.cancel()
        with pytest.raises(asyncio.CancelledError):
            await old
        await engine.settle()
        assert set(engine.worker.snapshots) == {2, 3}

    run(model, work)


def test_a_way_back_costs_no_call_and_a_discarded_version_is_installed_whole(
    model: ServingModel,
) -> None:
    second, to_second = following(model, (1, 1))
    third, to_third = following(second, (1, 2))

    async def work(engine: StubEngine) -> None:
        await engine.publish(second, change=to_second)
        calls = len(engine.worker.calls)
        await engine.publish(model)
        assert engine.model is model
        await engine.publish(second)
        await engine.publish(second)  # the current one again: the way back stays
        await engine.settle()
        assert len(engine.worker.calls) == calls
        await engine.publish(third, change=to_third)
        await engine.settle()
        assert set(engine.worker.snapshots) == {2, 3}
        fourth, to_fourth = following(replace(model, version=3), (1, 3))
        # Its parent is not there any more: whole, change or no change.
        await engine.publish(fourth, change=replace(to_fourth, parent=1))
        assert engine.worker.calls[-1] == "gti_install"
        assert engine.worker.snapshots[4].counts == [4, 4]

    run(model, work)


@pytest.mark.parametrize("fails_at", ["gti_write_rows", "gti_follow"])
def test_a_publish_that_fails_leaves_the_old_version_and_can_be_repeated(
    model: ServingModel, fails_at: str
) -> None:
    second, change = following(model, (1, 1))

    async def work(engine: StubEngine) -> None:
        engine.worker.fails_at = fails_at
        with pytest.raises(EngineError, match=f"{fails_at} failed in the worker: out of order"):
            await engine.publish(second, rows=ROWS, change=change)
        await engine.settle()
        assert engine.model is model
        assert set(engine.worker.snapshots) == {1}
        engine.go.set()
        assert (await engine.decode(DecodeRequest(model, "r", [7], 1, 1)))[0].row == 1
        engine.worker.fails_at = ""
        await engine.publish(second, rows=ROWS, change=change)
        assert engine.model is second

    run(model, work)


def test_a_change_that_does_not_make_the_version_is_refused(model: ServingModel) -> None:
    second, change = following(model, (1, 1))

    async def work(engine: StubEngine) -> None:
        for wrong in (
            replace(change, added_available=np.zeros(1, np.bool_)),
            replace(change, added=np.empty((0, 2), np.int32), added_available=np.empty(0, bool)),
            replace(change, retired=(0,)),
        ):
            with pytest.raises(EngineError, match="version 2 has"):
                await engine.publish(second, change=wrong)
            await engine.settle()
            assert set(engine.worker.snapshots) == {1}
        assert engine.model is model

    run(model, work)


def test_a_publish_that_is_cancelled_leaves_nothing_in_the_worker(model: ServingModel) -> None:
    second, change = following(model, (1, 1))

    async def work(engine: StubEngine) -> None:
        engine.worker.hangs_at = "gti_follow"
        task = asyncio.create_task(engine.publish(second, change=change))
        await engine.worker.reached.wait()
        waiting = asyncio.create_task(engine.publish(second, change=change))
        await engine.settle()
        assert engine.worker.calls[1:] == ["gti_follow"]  # one after the other
        engine.worker.hangs_at = ""
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await waiting
        assert engine.worker.calls[1:] == ["gti_follow", "gti_discard", "gti_follow"]
        assert engine.model is second
        assert set(engine.worker.snapshots) == {1, 2}

    run(model, work)


def test_a_publish_ends_when_the_process_dies(model: ServingModel) -> None:
    second, change = following(model, (1, 1))

    async def work(engine: StubEngine) -> None:
        engine.worker.hangs_at = "gti_follow"
        task = asyncio.create_task(engine.publish(second, change=change))
        await engine.worker.reached.wait()
        engine.worker.errored = True
        with pytest.raises(EngineDeadError, match="gone"):
            await task
        assert engine.model is model
        with pytest.raises(EngineDeadError):
            await engine.publish(second)

    run(model, work)


def test_equal_keys_of_two_versions_are_two_selections(model: ServingModel) -> None:
    second, change = following(model, (1, 1))

    async def work(engine: StubEngine) -> None:
        engine.go.set()
        await engine.publish(second, change=change)
        for version in (model, second, second):
            mask = np.ones(len(version.catalog), np.bool_)
            request = DecodeRequest(version, "r", [7], 1, 1, selection=Selection("drama", mask))
            await engine.decode(request)
        assert engine.worker.selected == [(1, "drama"), (2, "drama")]

    run(model, work)


def test_no_more_selections_are_held_than_fit_and_idle_ones_go_first() -> None:
    async def scenario() -> None:
        worker = StubWorker()

        async def call(method: str, *args: Any) -> Any:
            return (await worker.collective_rpc(method, args))[0]

        held = HeldSelections(1, call, lambda future: None)
        mask = np.ones(3, np.bool_)

        async def use(key: str, until: asyncio.Event) -> None:
            async with held.holding(Selection(key, mask)):
                await until.wait()

        done = asyncio.Event()
        done.set()
        await use("idle", done)
        stay = asyncio.Event()
        users = [asyncio.create_task(use(f"{n}", stay)) for n in range(HELD_SELECTIONS)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(worker.selected) == HELD_SELECTIONS
        assert (1, "idle") not in worker.selected
        with pytest.raises(EngineError, match="in use at once"):
            await use("one more", done)
        stay.set()
        await asyncio.gather(*users)
        await use("one more", done)
        assert len(worker.selected) == HELD_SELECTIONS

    asyncio.run(scenario())
