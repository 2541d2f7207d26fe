"""The engine with a vLLM request per beam, kept for models without a beam class."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from loop_thread import LoopThread
from marks import STARTS_VLLM
from tiny_llama import Oracle, tiny_serving_model

from service.engine.base import DecodeRequest
from service.engine.vllm_per_beam import LOGPROBS_PER_REQUEST, VllmPerBeamEngine
from service.engine.vllm_start import VllmOptions

pytestmark = STARTS_VLLM

PROMPT = [3 + (7 * i) % 80 for i in range(47)]


def test_it_equals_the_oracle_and_leaves_nothing_running(tmp_path: Path) -> None:
    model = tiny_serving_model(tmp_path / "model", tied=False)
    root = model.index.children(0, len(model.index), 0, model.index.admissible())
    assert len(root.codes) > LOGPROBS_PER_REQUEST  # the first level takes two requests
    engine = VllmPerBeamEngine(model, VllmOptions(dtype="float32", kv_cache_gib=0.0625))
    oracle = Oracle(model)

    async def cancelled() -> None:
        request = DecodeRequest(model, "gone", PROMPT, k=10, beam_width=100)
        task = asyncio.create_task(engine.decode(request))
        for _ in range(10_000):
            if engine.in_flight() >= 100:
                break
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for _ in range(1_000):
            if not engine.in_flight():
                break
            await asyncio.sleep(0.01)

    with LoopThread() as loop:
        try:
            loop.run(engine.start(), timeout=600)
            for width in (1, 20, 50):
                out = frozenset(range(0, 400, 3))
                request = DecodeRequest(model, f"{width}", PROMPT, min(width, 10), width, out)
                got, want = loop.run(engine.decode(request)), oracle.decode(request)
                assert [item.sid for item in got] == [item.sid for item in want]
                assert [item.logprob for item in got] == pytest.approx(
                    [item.logprob for item in want], abs=1e-3
                )
            loop.run(cancelled(), timeout=60)
            assert loop.run(engine._llm.reset_prefix_cache())
        finally:
            loop.run(engine.stop())
