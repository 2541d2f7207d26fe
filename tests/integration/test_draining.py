"""SIGTERM and a dead engine, in a process of its own with a real socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.engine.base import Engine, ServingModel
from service.engine.fake import FakeEngine

PROGRAM = """
import sys
from pathlib import Path
from gti_core.bundle import load_bundle
from service.__main__ import _listen, _serve
from service.context import ServingContext
from service.engine.fake import FakeEngine
from service.logs import configure_logging
from service.settings import Settings

configure_logging("info", "text")
settings = Settings(port=int(sys.argv[2]), data_dir=Path(sys.argv[3]), shutdown_timeout_s=8)
context = ServingContext.from_bundle(load_bundle(Path(sys.argv[1])))
engine = FakeEngine(context.model(Path("unused")), delay_s=float(sys.argv[4]))
_serve(settings, context, lambda _: engine, _listen(settings))
"""
BODY = {"history": ["a1"], "k": 2}


@contextmanager
def served(
    bundle: Path, folder: Path, delay_s: float
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(bundle), str(port), str(folder), str(delay_s)],
        stdout=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"{url}/readyz").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, process.poll()
            time.sleep(0.1)
        yield process, url
    finally:
        process.kill()
        process.wait()


def test_sigterm_finishes_accepted_work_and_refuses_new_work(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    with served(tiny_bundle, tmp_path, 1.0) as (process, url):

        async def scenario() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                assert (await client.get("/startupz")).status_code == 200
                batch = {"requests": [BODY] * 3}
                accepted = [
                    asyncio.create_task(client.post("/v1/recommendations", json=BODY))
                    for _ in range(20)
                ]
                accepted.append(
                    asyncio.create_task(client.post("/v1/recommendations:batch", json=batch))
                )
                await asyncio.sleep(1.5)
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                assert (await client.get("/livez")).status_code == 200
                assert (await client.get("/startupz")).status_code == 200
                ready = await client.get("/readyz")
                assert (ready.status_code, ready.json()["state"]) == (503, "stopping")
                refused = await client.post("/v1/recommendations", json=BODY)
                assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
                assert refused.headers["Retry-After"] == "5"
                assert refused.headers["Connection"] == "close"
                answers = await asyncio.gather(*accepted)
                for answer in answers:  # on a loaded machine some may have come too late
                    assert answer.headers["Connection"] == "close"
                    if answer.status_code != 200:
                        assert answer.json()["state"] == "stopping"
                done = [answer for answer in answers if answer.status_code == 200]
                assert len(done) > 10
                if answers[-1] in done:
                    assert [r["status"] for r in answers[-1].json()["results"]] == [200] * 3

        asyncio.run(scenario())
        assert process.wait(10) == 0


def test_a_second_signal_ends_it_at_once(tiny_bundle: Path, tmp_path: Path) -> None:
    with served(tiny_bundle, tmp_path, 30) as (process, url):
        caller = threading.Thread(target=_ask_in_vain, args=(url,))
        caller.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.wait(6)
        caller.join()


def test_work_that_takes_too_long_is_given_up(tiny_bundle: Path, tmp_path: Path) -> None:
    with served(tiny_bundle, tmp_path, 30) as (process, url):
        caller = threading.Thread(target=_ask_in_vain, args=(url,))
        caller.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(20) == 0
        assert 6 < time.monotonic() - began < 15
        caller.join()


def _ask_in_vain(url: str) -> None:
    try:
        answer = httpx.post(
            f"{url}/v1/recommendations", json=BODY | {"timeout_ms": 60_000}, timeout=30
        )
    except httpx.TransportError:
        return
    assert answer.status_code != 200


class Stuck(FakeEngine):
    """Answers nothing; says at some time that it is dead, as the real engine does of a stopped
    process. Stopping it ends what waits."""

    def __init__(self, model: ServingModel) -> None:
        super().__init__(model, delay_s=60)
        self._waiting: set[asyncio.Task[Any]] = set()

    async def decode(self, request: Any) -> Any:
        from service.engine.base import EngineDeadError

        task = asyncio.ensure_future(super().decode(request))
        self._waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            raise EngineDeadError("the engine was stopped") from None
        finally:
            self._waiting.discard(task)

    async def stop(self) -> None:
        await super().stop()
        for task in self._waiting:
            task.cancel()


def test_calls_to_a_stuck_engine_get_503_as_soon_as_that_is_known(
    make_client: Any, tiny_model: ServingModel
) -> None:
    engine = Stuck(tiny_model)
    client = make_client(engine, timeout_ms=0).wait_ready()

    async def scenario() -> tuple[httpx.Response, float]:
        transport = httpx.ASGITransport(client.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            call = asyncio.create_task(http.post("/v1/recommendations", json=BODY))
            await asyncio.sleep(0.1)
            engine.kill()
            began = time.monotonic()
            return await call, time.monotonic() - began

    answer, seconds = client.runner.run(scenario())
    assert (answer.status_code, answer.json()["code"]) == (503, "engine_dead")
    assert seconds < 2
    assert client.get("/readyz").json()["code"] == "engine_dead"
    assert client.get("/livez").status_code == 200


def test_readiness_is_not_held_up_by_a_slow_look_at_the_engine(
    make_client: Any, tiny_model: ServingModel
) -> None:
    class Busy(FakeEngine):
        async def check(self) -> None:
            await asyncio.sleep(3)
            await super().check()

    client = make_client(Busy(tiny_model)).wait_ready()
    client.sleep(0.1)
    began = time.monotonic()
    assert client.get("/readyz").status_code == 200
    assert time.monotonic() - began < 1


def test_startup_stays_true_after_a_failure_and_false_before(
    make_client: Any, tiny_model: ServingModel
) -> None:
    slow = make_client(FakeEngine(tiny_model, start_delay_s=0.3))
    assert slow.get("/startupz").json()["code"] == "not_ready"
    slow.wait_ready()
    assert slow.get("/startupz").status_code == 200
    failed: Engine = FakeEngine(tiny_model, start_error="no weights")
    client = make_client(failed)
    client.sleep(0.1)
    assert client.get("/startupz").json()["code"] == "engine_dead"


@pytest.mark.parametrize("path", ["/livez", "/v1/info"])
def test_nothing_is_left_counted(client: Any, path: str) -> None:
    client.get(path)
    client.recommend(history=["a1"])
    client.recommend(history=[1])
    assert client.app.state.runtime.work.under_way == 0
    assert client.app.state.runtime.admission.requests == 0
