"""New versions in a running vLLM engine, tiny and random, against freshly loaded weights.

Tolerances as in test_vllm_tiny: untied heads in float32 agree with transformers to 1e-3 nats, tied
heads in bfloat16 to 0.25 nats; a row that was missed shows as several nats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_thread import LoopThread
from marks import STARTS_VLLM
from tiny_llama import Oracle, next_version, random_rows, saved_with_rows, tiny_serving_model

from gti_core.bundle.delta import Rows
from gti_core.decoding import ScoredRow
from gti_core.types import Sid
from service.engine.base import (
    CatalogChange,
    DecodeRequest,
    EngineError,
    Selection,
    ServingModel,
)
from service.engine.vllm_engine import VllmEngine, VllmOptions

pytestmark = STARTS_VLLM

PROMPT = [3 + (7 * i) % 80 for i in range(47)]
CODES = ((0, 140), (1, 20), (2, 6))
"""(level, code) of the first reserved code of each level."""
ITEMS = 400
NEW_SIDS: list[Sid] = [(140, 3, 2), (5, 20, 1), (7, 11, 6), (140, 20, 6)]
PUBLISHES = 50


@dataclass
class Swapped:
    """An engine that went from a first to a second version, and what it must answer."""

    loop: LoopThread
    engine: VllmEngine
    first: ServingModel
    second: ServingModel
    change: CatalogChange
    rows: Rows
    fresh: Oracle
    """Weights loaded with the new rows in them."""
    stale: Oracle
    """Weights without."""
    before: list[list[ScoredRow]]
    """`old_answers` before the second version was published."""
    tolerance: float

    def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        return self.loop.run(self.engine.decode(request))

    def state(self) -> dict[str, Any]:
        return self.loop.run(self.engine.state())


def requests(model: ServingModel, histories: Sequence[Sequence[Sid]]) -> list[DecodeRequest]:
    """Exhaustive requests: `PROMPT`, then the codes of a history."""
    count = len(model.catalog)
    return [
        DecodeRequest(
            model,
            f"history-{number}",
            [*PROMPT, *(token for sid in history for token in model.vocabulary.token_ids(sid))],
            count,
            count,
        )
        for number, history in enumerate(histories)
    ]


async def old_answers(engine: VllmEngine, model: ServingModel) -> list[list[ScoredRow]]:
    """Of the first version, one by one: first without, then with a prefix from the cache."""
    assert await engine._llm.reset_prefix_cache()
    sids = [item.sid for item in model.catalog.items[:3]]
    return [await engine.decode(one) for one in 2 * requests(model, [[], sids])]


def second_version(model: ServingModel, tied: bool) -> tuple[ServingModel, CatalogChange, Any]:
    vocabulary = model.vocabulary
    numbers = [vocabulary.row(level, code) for level, code in CODES]
    for level, _ in CODES:
        vocabulary = vocabulary.activate(level)
    following, change = next_version(model, NEW_SIDS, vocabulary=vocabulary, retired=(7, 8))
    return following, change, random_rows(model, numbers, tied=tied, seed=9)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Swapped]]:
    base = tmp_path_factory.mktemp("swap")
    models = {
        kind: tiny_serving_model(base / kind, tied=kind == "tied", seed=seed, items=ITEMS)
        for seed, kind in enumerate(("untied", "tied"))
    }
    running = {
        kind: VllmEngine(
            model,
            VllmOptions(
                dtype="bfloat16" if kind == "tied" else "float32",
                kv_cache_gib=0.0625,
                scratch_blocks=512,
            ),
        )
        for kind, model in models.items()
    }

    async def swap(kind: str, loop: LoopThread) -> Swapped:
        model, engine = models[kind], running[kind]
        second, change, rows = second_version(model, kind == "tied")
        before = await old_answers(engine, model)
        await engine.publish(second, rows=rows, change=change)
        fresh = saved_with_rows(second, rows, base / f"{kind}-fresh")
        tolerance = 0.25 if kind == "tied" else 1e-3
        return Swapped(
            loop, engine, model, second, change, rows, Oracle(fresh), Oracle(second), before,
            tolerance,
        )  # fmt: skip

    async def every(what: str) -> None:
        await asyncio.gather(*(getattr(engine, what)() for engine in running.values()))

    with LoopThread() as loop:
        try:
            loop.run(every("start"), timeout=600)
            yield {kind: loop.run(swap(kind, loop)) for kind in running}
        finally:
            loop.run(every("stop"))


@pytest.fixture(params=["untied", "tied"])
def swapped(request: pytest.FixtureRequest, engines: dict[str, Swapped]) -> Swapped:
    return engines[request.param]


def by_row(found: Sequence[ScoredRow]) -> dict[int, float]:
    return {item.row: item.logprob for item in found}


def assert_close(got: dict[int, float], want: dict[int, float], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for row, score in want.items():
        assert got[row] == pytest.approx(score, abs=tolerance), row


def test_a_swapped_engine_equals_a_freshly_loaded_one(swapped: Swapped) -> None:
    histories = [[], [NEW_SIDS[0]], [NEW_SIDS[3], (0, 0, 0), NEW_SIDS[1], NEW_SIDS[2]]]
    new = set(range(ITEMS, ITEMS + len(NEW_SIDS)))
    for number, request in enumerate(requests(swapped.second, histories)):
        got = by_row(swapped.decode(request))
        assert new <= got.keys()
        assert not {7, 8} & got.keys()
        assert_close(got, by_row(swapped.fresh.decode(request)), swapped.tolerance)
        # Old rows on either side would show: new items score otherwise, and with a new item in
        # the history so do all the others.
        stale = by_row(swapped.stale.decode(request))
        assert max(abs(stale[row] - got[row]) for row in new) > 4 * swapped.tolerance
        if number:
            others = got.keys() - new
            assert max(abs(stale[row] - got[row]) for row in others) > 4 * swapped.tolerance


def test_a_new_item_is_recommended_like_any_other(swapped: Swapped) -> None:
    """A prompt after which the new item is the best, found among many."""
    model = swapped.second
    for seed in range(200):
        rng = np.random.default_rng(seed)
        request = DecodeRequest(model, "find", rng.integers(3, 90, 20).tolist(), 1, 20)
        best = swapped.fresh.decode(request)[0]
        if best.row >= ITEMS:
            break
    else:
        raise AssertionError("no prompt leads to a new item")
    assert swapped.decode(replace(request, k=10))[0].row == best.row


def test_a_prefix_cached_before_the_swap_serves_after_it(swapped: Swapped) -> None:
    [request, *_] = requests(swapped.second, [[]])
    cached = swapped.engine.info()["cached_prompt_tokens"]
    warm = swapped.decode(request)
    assert swapped.engine.info()["cached_prompt_tokens"] > cached
    assert swapped.loop.run(swapped.engine._llm.reset_prefix_cache())
    cold = swapped.decode(request)
    assert [item.row for item in warm] == [item.row for item in cold]
    assert [item.logprob for item in warm] == pytest.approx(
        [item.logprob for item in cold], abs=swapped.tolerance / 10
    )


def test_the_old_version_answers_as_before_to_the_last_bit(swapped: Swapped) -> None:
    assert swapped.loop.run(old_answers(swapped.engine, swapped.first)) == swapped.before


def test_what_can_not_be_published_changes_nothing(swapped: Swapped) -> None:
    tied = swapped.rows.rows_out is None
    third, change = next_version(swapped.second, [(1, 20, 3)])
    spoken_for = random_rows(third, swapped.rows.numbers.tolist(), tied=tied, seed=1)
    outside = random_rows(third, [third.vocabulary.rows], tied=tied, seed=1)
    other_kind = random_rows(third, [141], tied=not tied, seed=1)
    before = swapped.state()["versions"]
    for rows, complaint in (
        (spoken_for, "reached would change"),
        (outside, "no row"),
        (other_kind, "output rows"),
        (replace(outside, rows_in=outside.rows_in[:, :3], rows_out=None), "width|shape"),
    ):
        with pytest.raises(EngineError, match=complaint):
            swapped.loop.run(swapped.engine.publish(third, rows=rows, change=change))
    with pytest.raises(EngineError, match="version 3 has"):
        swapped.loop.run(swapped.engine.publish(third, change=replace(change, retired=(9,))))
    taken = replace(change, added=np.array([NEW_SIDS[0]], np.int32))
    with pytest.raises(EngineError, match="share a SID"):
        swapped.loop.run(swapped.engine.publish(third, change=taken))
    assert swapped.engine.model is swapped.second
    assert swapped.state()["versions"] == before == [1, 2]
    assert swapped.loop.run(old_answers(swapped.engine, swapped.first)) == swapped.before


def test_a_way_back_and_forth(swapped: Swapped) -> None:
    async def there_and_back() -> None:
        await swapped.engine.publish(swapped.first)
        assert swapped.engine.model is swapped.first
        # The rows may be given again, as long as they are the same.
        await swapped.engine.publish(swapped.second, rows=swapped.rows, change=swapped.change)

    swapped.loop.run(there_and_back())
    assert swapped.engine.model is swapped.second
    [request] = requests(swapped.second, [[]])
    assert_close(
        by_row(swapped.decode(request)), by_row(swapped.fresh.decode(request)), swapped.tolerance
    )


def test_fifty_versions_under_load(engines: dict[str, Swapped], tmp_path: Path) -> None:
    """No call fails, and each answer is that of the version which the request began with."""
    swapped = engines["untied"]
    engine = swapped.engine
    versions, updates = chain(swapped.second)
    fresh = saved_with_rows(
        swapped.second, reduce(Rows.joined, updates, swapped.rows), tmp_path / "all"
    )
    oracle = Oracle(fresh)
    answered: list[tuple[DecodeRequest, list[ScoredRow]]] = []
    cancelled = 0

    async def client(number: int, over: asyncio.Event, served: asyncio.Event) -> None:
        nonlocal cancelled
        rng = np.random.default_rng(number)
        while not over.is_set():
            request = mixed_request(engine.model, rng)
            task = asyncio.create_task(engine.decode(request))
            if rng.random() < 0.1:
                await asyncio.wait([task], timeout=float(rng.random() * 0.02))
                task.cancel()
            try:
                answered.append((request, await task))
            except asyncio.CancelledError:
                cancelled += 1
            served.set()

    async def load() -> list[int]:
        over, served = asyncio.Event(), asyncio.Event()
        clients = [asyncio.create_task(client(number, over, served)) for number in range(4)]
        for version, rows, change in versions:
            await engine.publish(version, rows=rows, change=change)
            for _ in range(3):
                served.clear()
                await asyncio.wait_for(served.wait(), 60)
        over.set()
        await asyncio.gather(*clients)
        wanted = sorted(version.version for version, _, _ in versions[-2:])
        for _ in range(1000):
            left: list[int] = (await engine.state())["versions"]
            if left == wanted:
                break
            await asyncio.sleep(0.01)
        return left

    left = swapped.loop.run(load())
    assert left == [versions[-2][0].version, versions[-1][0].version]
    assert len(answered) >= 100
    assert len({request.model.version for request, _ in answered}) >= PUBLISHES - 5
    for request, got in answered:
        want = oracle.decode(request)
        assert [item.row for item in got] == [item.row for item in want]
        assert [item.logprob for item in got] == pytest.approx(
            [item.logprob for item in want], abs=1e-3
        )


Step = tuple[ServingModel, Rows | None, CatalogChange | None]


def chain(model: ServingModel) -> tuple[list[Step], list[Rows]]:
    """Versions of every kind: items, codes, items out of and back in service, whole ones."""
    rng = np.random.default_rng(3)
    steps: list[Step] = []
    updates: list[Rows] = []
    taken = {item.sid for item in model.catalog}
    for number in range(PUBLISHES):
        vocabulary, rows, level = model.vocabulary, None, number % 3
        if vocabulary.reserved(level) and number % 4 == 0:
            row = vocabulary.row(level, vocabulary.active[level])
            rows = random_rows(model, [row], tied=False, seed=100 + number)
            vocabulary = vocabulary.activate(level)
        sids: list[Sid] = []
        while len(sids) < number % 3:
            sid = tuple(int(rng.integers(active)) for active in vocabulary.active)
            if rows is not None:
                sid = (*sid[:level], vocabulary.active[level] - 1, *sid[level + 1 :])
            if sid not in taken:
                taken.add(sid)
                sids.append(sid)
        retired = rng.choice(ITEMS, 5, replace=False).tolist()
        restored = [row for row in rng.choice(ITEMS, 5).tolist() if not model.index.available[row]]
        model, change = next_version(
            model, sids, vocabulary=vocabulary, retired=retired, restored=restored
        )
        # Every seventh has no change to go by and is installed whole.
        steps.append((model, rows, None if number % 7 == 6 else change))
        if rows is not None:
            updates.append(rows)
    return steps, updates


def mixed_request(model: ServingModel, rng: np.random.Generator) -> DecodeRequest:
    """Histories with new items in them, widths, exclusions and selections of all kinds."""
    items = model.catalog.items
    history = rng.integers(0, len(items), rng.integers(1, 12))
    if rng.random() < 0.5:
        history[-1] = len(items) - 1
    prompt = [5, 6, 7]
    for row in history:
        prompt.extend(model.vocabulary.token_ids(items[row].sid))
    width = int(rng.choice([1, 5, 20, 40]))
    selection = None
    if rng.random() < 0.3:
        mask = np.arange(len(items)) % 3 == 1
        selection = Selection("every third", mask)
    return DecodeRequest(
        model, "mixed", prompt, width, width, frozenset(history.tolist()), selection=selection
    )
