"""The whole service over real vLLM engines, with real sockets, on tiny random models.

Clients that leave, an engine that is stopped, an engine that is killed.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from marks import STARTS_VLLM
from served import alive, wait_until
from tiny_llama import MAX_TOKENS, tiny_serving_model

from gti_core.prompts import AppendOnlyPrompt
from service.app import create_app
from service.context import ServingContext
from service.engine.vllm_engine import VllmEngine, VllmOptions
from service.settings import Settings

pytestmark = STARTS_VLLM

CLIENTS = 1000
NOTICED_S = 5.0
BODY = {"history": ["item-1", "item-2", "item-3"], "k": 10, "beam_width": 200}


@dataclass
class Running:
    """A service in a thread of its own."""

    url: str
    address: tuple[str, int]
    engine: VllmEngine
    app: Any
    server: uvicorn.Server
    loop: asyncio.AbstractEventLoop

    def core(self) -> psutil.Process:
        (process,) = self.engine._llm.engine_core.resources.engine_manager.processes
        return psutil.Process(process.pid)

    def idle(self) -> bool:
        """Nothing is under way, and every KV block is free: only then can the cache be reset."""
        if self.engine.in_flight() or self.app.state.runtime.admission.requests:
            return False
        reset = asyncio.run_coroutine_threadsafe(self.engine._llm.reset_prefix_cache(), self.loop)
        return bool(reset.result(10))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    model = tiny_serving_model(tmp_path, tied=True)
    prompt = AppendOnlyPrompt("", (5, 6, 7), max_history=8, drop=4)
    context = ServingContext.build("tiny", "0" * 64, model.catalog, model.vocabulary, prompt)
    assert context.model(tmp_path).max_tokens <= MAX_TOKENS
    engine = VllmEngine(context.model(tmp_path), VllmOptions(kv_cache_gib=0.0625))
    settings = Settings(
        audit_log="", max_queued_beams=10_000_000, max_queued_tokens=1_000_000_000, timeout_ms=0
    )
    ready = threading.Event()
    server: uvicorn.Server

    def failed() -> None:
        server.should_exit = True

    app = create_app(context, settings, lambda _: engine, on_ready=ready.set, on_failed=failed)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=5)
    )
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(300), app.state.runtime.failure
        address = server.servers[0].sockets[0].getsockname()
        yield Running(f"http://{address[0]}:{address[1]}", address, engine, app, server, loops[0])
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


async def leave(address: tuple[str, int], after_s: float, slots: asyncio.Semaphore) -> None:
    """Send a request and close the connection before its answer can have come."""
    async with slots:
        body = b'{"history": ["item-1", "item-2"], "k": 10, "beam_width": 100}'
        _, writer = await asyncio.open_connection(*address)
        writer.write(
            b"POST /v1/recommendations HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await writer.drain()
        await asyncio.sleep(after_s)
        writer.transport.abort()


def test_clients_that_leave_free_the_engine(running: Running) -> None:
    assert httpx.post(f"{running.url}/v1/recommendations", json=BODY).status_code == 200
    assert running.idle()

    async def all_leave() -> None:
        slots = asyncio.Semaphore(200)
        await asyncio.gather(
            *(leave(running.address, (number % 20) / 100, slots) for number in range(CLIENTS))
        )

    asyncio.run(all_leave())
    wait_until(running.idle, "something is still under way", 2.0)
    answer = httpx.post(f"{running.url}/v1/recommendations", json=BODY, timeout=10)
    assert answer.status_code == 200
    assert running.idle()


@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_engine_is_noticed(running: Running, kind: signal.Signals) -> None:
    core = running.core()
    answers: list[httpx.Response | httpx.TransportError] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                answers.append(
                    httpx.post(f"{running.url}/v1/recommendations", json=BODY, timeout=60)
                )
            except httpx.TransportError as error:
                answers.append(error)
                return

    callers = [threading.Thread(target=ask) for _ in range(4)]
    for caller in callers:
        caller.start()
    wait_until(lambda: len(answers) > 3, "no answers")
    assert httpx.get(f"{running.url}/readyz").status_code == 200
    core.send_signal(kind)
    began = time.monotonic()
    noticed = None
    while time.monotonic() - began < 3 * NOTICED_S:
        try:
            if httpx.get(f"{running.url}/readyz", timeout=5).status_code == 503:
                noticed = time.monotonic() - began
                break
        except httpx.TransportError:  # the server has ended by now: noticed too
            noticed = time.monotonic() - began
            break
        time.sleep(0.05)
    done.set()
    for caller in callers:
        caller.join(30)
    assert noticed is not None
    assert noticed < NOTICED_S
    statuses = {a.status_code for a in answers if isinstance(a, httpx.Response)}
    assert statuses <= {200, 503}
    assert 503 in statuses
    # The service ends, non-zero behind `gti serve`, and leaves no process behind.
    wait_until(lambda: running.server.should_exit, "the service goes on", 10)
    assert "the engine is gone" in running.app.state.runtime.failure
    wait_until(lambda: not alive([core]), "the engine process is still there", 30)
