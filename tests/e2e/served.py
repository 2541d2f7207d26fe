"""A running engine for tests, and what they say and wait for of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
from loop_thread import LoopThread
from tiny_llama import Oracle

from gti_core.decoding import ScoredRow
from service.engine.base import DecodeRequest, ServingModel
from service.engine.vllm_engine import VllmEngine


@dataclass
class Served:
    """A running engine, what it serves and the oracle for it."""

    loop: LoopThread
    engine: VllmEngine
    model: ServingModel
    oracle: Oracle

    def request(self, request_id: str, prompt: Sequence[int], *args: Any, **named: Any) -> Any:
        return DecodeRequest(self.model, request_id, prompt, *args, **named)

    def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        return self.loop.run(self.engine.decode(request))

    def idle(self) -> bool:
        """True when neither side of vLLM holds a request: only then are all KV blocks free."""
        return self.engine.in_flight() == 0 and bool(
            self.loop.run(self.engine._llm.reset_prefix_cache())
        )


def assert_same(got: Sequence[ScoredRow], want: Sequence[ScoredRow], tolerance: float) -> None:
    assert [item.row for item in got] == [item.row for item in want]
    assert [item.sid for item in got] == [item.sid for item in want]
    assert [item.logprob for item in got] == pytest.approx(
        [item.logprob for item in want], abs=tolerance
    )


def core_process(served: Served) -> psutil.Process:
    """vLLM's EngineCore process of one engine; its worker runs inside it."""
    (process,) = served.engine._llm.engine_core.resources.engine_manager.processes
    return psutil.Process(process.pid)


def wait_until(condition: Callable[[], bool], complaint: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)


async def busy_with(requests: int, engine: VllmEngine) -> None:
    for _ in range(10_000):
        if engine.in_flight() >= requests:
            return
        await asyncio.sleep(0.001)
    raise AssertionError(f"only {engine.in_flight()} requests in flight")


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
