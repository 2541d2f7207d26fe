"""A real vLLM engine with a tiny random Llama, against transformers in float32.

Two engines serve the module: untied heads in float32, where scores must agree to 1e-3 nats, and
tied heads in bfloat16, where 0.25 nats are allowed (scores differ by several nats). The tests run
in file order; the last ones take the engines down.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from loop_thread import LoopThread
from marks import STARTS_VLLM
from served import Served, alive, assert_same, busy_with, core_process, wait_until
from tiny_llama import MAX_TOKENS, Oracle, tiny_serving_model

from gti_core.decoding import ScoredRow, exhaustive_search
from service.engine.base import (
    DecodeRequest,
    EngineDeadError,
    EngineError,
    PromptTooLongError,
    Selection,
)
from service.engine.held_selections import HELD_SELECTIONS
from service.engine.vllm_beams.wire import FAILED, BeamRequest
from service.engine.vllm_engine import VllmEngine, VllmOptions

pytestmark = STARTS_VLLM

PROMPT = [3 + (7 * i) % 80 for i in range(47)]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    untied_model = tiny_serving_model(tmp_path_factory.mktemp("untied"), tied=False)
    tied_model = tiny_serving_model(tmp_path_factory.mktemp("tied"), tied=True, seed=1)
    # A pool so small that wide beams run in parts, and few requests fit it together.
    untied = VllmEngine(
        untied_model, VllmOptions(dtype="float32", kv_cache_gib=0.0625, scratch_blocks=128)
    )
    tied = VllmEngine(
        tied_model, VllmOptions(dtype="bfloat16", kv_cache_gib=0.0625, check_timeout_s=2.0)
    )

    async def start() -> None:
        await asyncio.gather(untied.start(), tied.start())

    async def stop() -> None:
        await asyncio.gather(untied.stop(), tied.stop())

    with LoopThread() as loop:
        try:
            loop.run(start(), timeout=1800)
            yield (
                Served(loop, untied, untied_model, Oracle(untied_model)),
                Served(loop, tied, tied_model, Oracle(tied_model)),
            )
        finally:
            loop.run(stop())


@pytest.fixture
def untied(engines: tuple[Served, Served]) -> Served:
    return engines[0]


@pytest.fixture
def tied(engines: tuple[Served, Served]) -> Served:
    return engines[1]


@pytest.mark.parametrize("width", [1, 10, 11, 50, 256])
def test_items_and_scores_equal_the_oracle(untied: Served, width: int) -> None:
    request = untied.request("equal", PROMPT, k=min(width, 50), beam_width=width)
    got = untied.decode(request)
    assert len(got) == request.k
    assert_same(got, untied.oracle.decode(request), 1e-3)


def test_an_answer_says_where_its_time_went(untied: Served) -> None:
    # Its own first block, so that the prompt is not in the prefix cache.
    request = untied.request("timed", [90, *PROMPT], k=20, beam_width=50)
    began = time.monotonic()
    untied.decode(request)
    took = time.monotonic() - began
    timings = request.timings
    assert timings.queue_s is not None
    assert timings.prefill_s is not None
    assert timings.beams_s is not None
    assert timings.prefill_s > 0
    assert timings.queue_s + timings.prefill_s + timings.beams_s <= took
    assert len(timings.constraint_s) == untied.model.vocabulary.levels
    assert 0 < sum(timings.constraint_s) < timings.beams_s
    assert (timings.prompt_tokens, timings.cached_tokens) == (len(PROMPT) + 1, 0)
    # Decoded again, the same request is timed anew, and its prompt's full blocks are there.
    untied.decode(request)
    assert timings.cached_tokens is not None
    assert timings.cached_tokens > 0
    assert timings.queue_s < took


def test_every_first_code_comes_back(untied: Served) -> None:
    model = untied.model
    root = model.index.children(0, len(model.index), 0, model.index.admissible())
    request = untied.request("wide", PROMPT[:9], k=len(root.codes), beam_width=len(root.codes))
    assert_same(untied.decode(request), untied.oracle.decode(request), 1e-3)


def test_a_beam_as_wide_as_the_catalogue_is_exhaustive(untied: Served) -> None:
    model = untied.model
    items = len(model.catalog)
    got = untied.decode(untied.request("all", PROMPT, k=items, beam_width=items))
    want = exhaustive_search(
        lambda prefixes: untied.oracle.score(PROMPT, prefixes),
        [item.sid for item in model.catalog],
        model.vocabulary,
        items,
    )
    assert {item.row for item in got} == set(range(items))
    assert [item.logprob for item in got] == pytest.approx([s for _, s in want], abs=1e-3)
    scores = dict(want)
    assert all(item.logprob == pytest.approx(scores[item.sid], abs=1e-3) for item in got)


def test_excluded_rows_never_come_back(untied: Served) -> None:
    best = untied.decode(untied.request("before", PROMPT, k=30, beam_width=50))
    # The best items, and everything below the best first code: a whole subtree goes.
    excluded = frozenset(item.row for item in best) | {
        row for row, item in enumerate(untied.model.catalog) if item.sid[0] == best[0].sid[0]
    }
    request = untied.request("after", PROMPT, k=50, beam_width=50, excluded_rows=excluded)
    got = untied.decode(request)
    assert len(got) == 50
    assert not excluded & {item.row for item in got}
    assert_same(got, untied.oracle.decode(request), 1e-3)


def test_all_but_three_items_excluded(untied: Served) -> None:
    excluded = frozenset(range(3, len(untied.model.catalog)))
    request = untied.request("three", PROMPT, k=10, beam_width=10, excluded_rows=excluded)
    assert {item.row for item in untied.decode(request)} == {0, 1, 2}


def test_nothing_admissible_gives_nothing(untied: Served) -> None:
    everything = frozenset(range(len(untied.model.catalog)))
    request = untied.request("none", PROMPT, k=10, beam_width=10, excluded_rows=everything)
    assert untied.decode(request) == []


def test_concurrent_requests_equal_the_same_ones_alone(untied: Served) -> None:
    requests = [
        untied.request(f"user-{user}", PROMPT[user : user + 5 * user + 4], k=10, beam_width=20)
        for user in range(8)
    ]

    async def together() -> list[list[ScoredRow]]:
        return await asyncio.gather(*(untied.engine.decode(request) for request in requests))

    for got, request in zip(untied.loop.run(together()), requests, strict=True):
        assert_same(got, untied.oracle.decode(request), 1e-3)
        assert_same(got, untied.decode(request), 1e-4)


def test_cancellation_leaves_nothing_running(untied: Served) -> None:
    engine = untied.engine

    async def cancel_half() -> tuple[list[object], list[list[ScoredRow]]]:
        tasks = [
            asyncio.create_task(
                engine.decode(untied.request(f"cancel-{i}", PROMPT, k=10, beam_width=200))
            )
            for i in range(6)
        ]
        await busy_with(6, engine)
        for task in tasks[:5]:
            task.cancel()
        cancelled = await asyncio.gather(*tasks[:5], return_exceptions=True)
        return list(cancelled), list(await asyncio.gather(*tasks[5:]))

    cancelled, finished = untied.loop.run(cancel_half())
    assert all(isinstance(result, asyncio.CancelledError) for result in cancelled)
    expected = untied.oracle.decode(untied.request("alone", PROMPT, k=10, beam_width=200))
    assert_same(finished[0], expected, 1e-3)
    wait_until(untied.idle, "requests are still in flight")


def test_cancellation_in_the_first_instants(untied: Served) -> None:
    async def cancel_after(turns: int) -> None:
        task = asyncio.create_task(
            untied.engine.decode(untied.request("early", PROMPT, k=5, beam_width=50))
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for turns in range(1, 12):
        untied.loop.run(cancel_after(turns))
    wait_until(untied.idle, "requests are still in flight")


def test_the_longest_prompt_fits_and_one_more_token_does_not(untied: Served) -> None:
    longest = [5] * (MAX_TOKENS - untied.model.index.levels)
    request = untied.request("fits", longest, k=3, beam_width=10)
    assert_same(untied.decode(request), untied.oracle.decode(request), 1e-3)
    with pytest.raises(PromptTooLongError, match="94 tokens"):
        untied.decode(untied.request("long", [*longest, 5], k=3, beam_width=10))


def test_bad_requests_are_refused_and_do_no_harm(untied: Served) -> None:
    with pytest.raises(EngineError, match="empty"):
        untied.decode(untied.request("empty", [], k=1, beam_width=1))
    with pytest.raises(EngineError, match="vocabulary"):
        untied.decode(untied.request("foreign", [3, 999_999], k=1, beam_width=1))
    with pytest.raises(EngineError, match="vocabulary"):
        untied.decode(untied.request("negative", [3, -1], k=1, beam_width=1))
    with pytest.raises(EngineError, match="beam_width"):
        untied.decode(untied.request("narrow", PROMPT, k=1, beam_width=0))
    with pytest.raises(EngineError, match="row 400"):
        untied.decode(
            untied.request("row", PROMPT, k=1, beam_width=1, excluded_rows=frozenset({400}))
        )
    assert untied.idle()
    untied.loop.run(untied.engine.check())


def test_info_states_what_runs(untied: Served, tied: Served) -> None:
    info = untied.engine.info()
    assert info["engine"] == "vllm"
    assert info["vllm_version"] == "0.31.0"
    assert info["dtype"] == "float32"
    assert tied.engine.info()["dtype"] == "bfloat16"
    assert info["max_model_len"] == MAX_TOKENS
    assert info["kv_blocks"] > 100


def test_a_batch_of_widths_lengths_and_filters_equals_the_oracle(untied: Served) -> None:
    """More requests than one step takes; some beams fit the pool, some run in parts."""
    rng = np.random.default_rng(5)
    items = len(untied.model.catalog)
    requests = []
    for number in range(200):
        width = int(rng.choice([1, 2, 5, 10, 20, 33, 64]))
        out = frozenset(int(row) for row in rng.choice(items, rng.integers(0, items), False))
        length = int(rng.integers(1, 90))
        prompt = [3 + (5 * i + number) % 80 for i in range(length)]
        requests.append(untied.request(f"mix-{number}", prompt, width, width, out))

    async def together() -> list[list[ScoredRow]]:
        return await asyncio.gather(*(untied.engine.decode(request) for request in requests))

    for got, request in zip(untied.loop.run(together()), requests, strict=True):
        assert len(got) == min(request.k, items - len(request.excluded_rows))
        assert not request.excluded_rows & {item.row for item in got}
        assert_same(got, untied.oracle.decode(request), 1e-3)
    assert untied.idle()


@pytest.mark.parametrize("left", [0, 1, 9, 10, 150])
def test_selections_and_lists_leave_exactly_what_they_leave(untied: Served, left: int) -> None:
    """k = 10, with 0, 1, k - 1, k and many items admissible."""
    rng = np.random.default_rng(left)
    items = len(untied.model.catalog)
    mask = np.zeros(items, dtype=np.bool_)
    chosen = rng.choice(items, 2 * left + 3, replace=False)
    mask[chosen] = True
    wanted, out = frozenset(chosen[:left].tolist()), frozenset(chosen[left:].tolist())
    selection = Selection(f"left-{left}", mask)
    requests = [
        untied.request("mask", PROMPT, 10, 20, out, selection=selection),
        untied.request("list", PROMPT, 10, 20, included_rows=wanted),
        untied.request("both", PROMPT, 10, 20, out, wanted | out, selection),
    ]
    for request in requests:
        got = untied.decode(request)
        assert len(got) == min(10, left)
        assert {item.row for item in got} <= wanted
        assert_same(got, untied.oracle.decode(request), 1e-3)


def test_more_selections_than_the_worker_keeps(untied: Served) -> None:
    items = len(untied.model.catalog)
    requests = []
    for number in range(HELD_SELECTIONS + 20):
        mask = np.zeros(items, dtype=np.bool_)
        mask[number::7] = True
        requests.append(
            untied.request(f"s{number}", PROMPT, 5, 5, selection=Selection(f"s{number}", mask))
        )

    async def together(part: Sequence[DecodeRequest]) -> list[list[ScoredRow]]:
        return await asyncio.gather(*(untied.engine.decode(request) for request in part))

    for start in range(0, len(requests), 40):
        part = requests[start : start + 40]
        for got, request in zip(untied.loop.run(together(part)), part, strict=True):
            assert_same(got, untied.oracle.decode(request), 1e-3)
    state = untied.loop.run(untied.engine.state())
    assert state["failures"] == 0
    assert untied.idle()


def test_a_search_that_fails_leaves_its_neighbours_alone(untied: Served) -> None:
    from vllm.inputs import tokens_input
    from vllm.pooling_params import PoolingParams

    async def raw(number: int, params: dict[str, object] | None) -> list[list[float]]:
        outputs = untied.engine._llm.encode(
            tokens_input(PROMPT),
            PoolingParams(task="plugin", skip_reading_prefix_cache=False, extra_kwargs=params),
            f"raw-{number}",
        )
        return [output async for output in outputs][-1].outputs.data.tolist()

    good = BeamRequest(untied.model.version, 5, 5).to_params()
    bad = [
        None,
        {**good, "beam_width": "wide"},
        {**good, "version": 99},
        {**good, "excluded": [-3]},
        {**good, "selection": "unknown"},
    ]
    request = untied.request("good", PROMPT, 5, 5)

    async def together() -> tuple[list[list[ScoredRow]], list[list[list[float]]]]:
        answers = asyncio.gather(*(untied.engine.decode(request) for _ in range(5)))
        broken = asyncio.gather(*(raw(number, params) for number, params in enumerate(bad)))
        return list(await answers), list(await broken)

    before = untied.loop.run(untied.engine.state())["failures"]
    answers, broken = untied.loop.run(together())
    for got in answers:
        assert_same(got, untied.oracle.decode(request), 1e-3)
    # What stands behind are times.
    assert [answer[0] for answer in broken] == [[FAILED, FAILED]] * len(bad)
    assert untied.loop.run(untied.engine.state())["failures"] == before + len(bad)


def test_a_prefix_in_the_cache_changes_nothing(untied: Served) -> None:
    prompt = [7 + (11 * i) % 80 for i in range(80)]
    untied.loop.run(untied.engine._llm.reset_prefix_cache())
    request = untied.request("prefix", prompt, k=20, beam_width=20)
    before = untied.engine.info()["cached_prompt_tokens"]
    failures = untied.loop.run(untied.engine.state())["failures"]
    cold = untied.decode(request)
    assert untied.engine.info()["cached_prompt_tokens"] == before
    warm = untied.decode(request)
    # Two full blocks of 32 tokens.
    assert untied.engine.info()["cached_prompt_tokens"] == before + 64
    assert_same(warm, cold, 1e-5)
    assert_same(cold, untied.oracle.decode(request), 1e-3)
    assert untied.loop.run(untied.engine.state())["failures"] == failures


def test_tied_heads_in_bfloat16(tied: Served) -> None:
    items = len(tied.model.catalog)
    request = tied.request("tied", PROMPT, k=items, beam_width=items)
    got = {item.row: item.logprob for item in tied.decode(request)}
    want = {item.row: item.logprob for item in tied.oracle.decode(request)}
    assert got.keys() == want.keys()
    assert max(want.values()) - min(want.values()) > 4
    for row, score in want.items():
        assert got[row] == pytest.approx(score, abs=0.25)


def test_a_stopped_process_fails_the_check_and_recovers(tied: Served) -> None:
    core = core_process(tied)
    core.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(EngineDeadError, match="not answered for 2 s"):
            tied.loop.run(tied.engine.check())
        assert time.monotonic() - started < 5
    finally:
        core.send_signal(signal.SIGCONT)
    tied.loop.run(tied.engine.check())


def test_a_killed_process_fails_everything_under_way(tied: Served) -> None:
    core = core_process(tied)
    workers = core.children(recursive=True)

    async def kill_during_decodes() -> list[object]:
        tasks = [
            asyncio.create_task(
                tied.engine.decode(tied.request(f"kill-{i}", PROMPT, k=10, beam_width=200))
            )
            for i in range(4)
        ]
        await busy_with(4, tied.engine)
        core.kill()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = tied.loop.run(kill_during_decodes())
    assert all(isinstance(result, EngineDeadError) for result in results), results
    with pytest.raises(EngineDeadError):
        tied.loop.run(tied.engine.check())
    with pytest.raises(EngineDeadError):
        tied.decode(tied.request("late", PROMPT, k=1, beam_width=1))
    wait_until(lambda: not alive([core, *workers]), "the worker outlived its engine")


def test_stop_is_idempotent_and_leaves_no_process(untied: Served, tied: Served) -> None:
    core = core_process(untied)
    processes = [core, *core.children(recursive=True)]
    assert alive(processes)

    async def stop_during_decodes() -> list[object]:
        tasks = [
            asyncio.create_task(
                untied.engine.decode(untied.request(f"stop-{i}", PROMPT, k=10, beam_width=200))
            )
            for i in range(4)
        ]
        await busy_with(4, untied.engine)
        await asyncio.gather(untied.engine.stop(), untied.engine.stop(), tied.engine.stop())
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = untied.loop.run(stop_during_decodes())
    assert all(isinstance(result, EngineDeadError) for result in results), results
    untied.loop.run(untied.engine.stop())
    wait_until(lambda: not alive(processes), "the engine outlived its stop")
    with pytest.raises(EngineDeadError, match="not running"):
        untied.decode(untied.request("late", PROMPT, k=1, beam_width=1))
    with pytest.raises(EngineDeadError, match="not running"):
        untied.loop.run(untied.engine.check())
