"""Admission, deadlines and batches through the API."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import httpx
import pytest
import uvicorn

from service.app import create_app
from service.context import ServingContext
from service.engine.base import ServingModel
from service.engine.fake import FakeEngine
from service.settings import Settings

BODY = {"history": ["a1"], "k": 2, "beam_width": 20}


async def together(app: Any, bodies: list[dict[str, Any]], path: str = "") -> list[httpx.Response]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await asyncio.gather(
            *(client.post(f"/v1/recommendations{path}", json=body) for body in bodies)
        )


@pytest.fixture
def slow(tiny_model: ServingModel) -> FakeEngine:
    return FakeEngine(tiny_model, delay_s=0.1)


def test_what_does_not_fit_is_refused_at_once_and_the_rest_is_served(
    make_client: Any, slow: FakeEngine
) -> None:
    client = make_client(slow, max_queued_beams=100, max_beam_width=100, max_k=50).wait_ready()
    answers = client.runner.run(together(client.app, [BODY] * 20))
    statuses = [answer.status_code for answer in answers]
    assert sorted(statuses) == [200] * 5 + [429] * 15
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["code"] == "overloaded"
            assert 1 <= int(answer.headers["Retry-After"]) <= 30
    assert slow.running == 0
    assert client.recommend(**BODY).status_code == 200


def test_popular_items_need_no_room_in_a_batch(make_client: Any, slow: FakeEngine) -> None:
    client = make_client(slow, max_queued_beams=20, max_beam_width=20, max_k=20).wait_ready()

    async def both() -> tuple[httpx.Response, httpx.Response]:
        filling = asyncio.create_task(together(client.app, [BODY]))
        await asyncio.sleep(0.1)
        batch = {"requests": [{"history": []}, BODY]}
        [answer] = await together(client.app, [batch], ":batch")
        return (await filling)[0], answer

    filling, batch = client.runner.run(both())
    assert filling.status_code == 200
    assert [one["status"] for one in batch.json()["results"]] == [200, 429]
    assert 1 <= batch.json()["results"][1]["problem"]["retry_after_s"] <= 30


def test_what_is_refused_unread_is_counted_and_logged_once(
    make_client: Any, slow: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(slow, max_queued_beams=20, max_beam_width=20, max_k=20).wait_ready()
    caplog.set_level("INFO")

    async def full_house() -> list[httpx.Response]:
        filling = asyncio.create_task(together(client.app, [BODY]))
        await asyncio.sleep(0.1)
        refused = await together(client.app, [BODY | {"k": -1}, *[BODY] * 12])
        await filling
        return refused

    refused = client.runner.run(full_house())
    assert [answer.status_code for answer in refused] == [429] * 13  # the faulty one, unread, too
    assert all(answer.headers["X-Request-ID"] for answer in refused)
    metrics = client.get("/metrics").text
    assert f'gti_problems_total{{code="overloaded"}} {len(refused)}.0' in metrics
    assert sum("refused unread" in record.message for record in caplog.records) == 1
    lines = [record.message for record in caplog.records if record.name == "gti.access"]
    assert sum("/v1/recommendations 429" in line for line in lines) == 0
    assert sum("/v1/recommendations 200" in line for line in lines) == 1


def test_a_batch_takes_turns_and_leaves_room(make_client: Any, slow: FakeEngine) -> None:
    client = make_client(slow, max_queued_beams=200, max_beam_width=100, max_k=50).wait_ready()

    async def batch_and_others() -> tuple[list[httpx.Response], list[httpx.Response]]:
        batch = asyncio.create_task(together(client.app, [{"requests": [BODY] * 12}], ":batch"))
        await asyncio.sleep(0.05)
        return await batch, await together(client.app, [BODY] * 3)

    batch, others = client.runner.run(batch_and_others())
    assert [one["status"] for one in batch[0].json()["results"]] == [200] * 12
    assert [one.status_code for one in others] == [200] * 3


def test_a_batch_alone_is_never_refused_in_part(make_client: Any, tiny_model: ServingModel) -> None:
    """Also on an engine that is known to be slow, with widths that nobody named."""
    client = make_client(FakeEngine(tiny_model, delay_s=0.05), max_queue_ms=200).wait_ready()
    for _ in range(3):
        assert client.recommend(history=["a1"], k=3).status_code == 200
    body = {"requests": [{"history": ["a1"], "k": 3}] * 60}
    results = client.post("/v1/recommendations:batch", json=body).json()["results"]
    assert [one["status"] for one in results] == [200] * 60


def test_a_request_without_a_deadline_gets_the_service_s(
    make_client: Any, tiny_model: ServingModel
) -> None:
    engine = FakeEngine(tiny_model, delay_s=5)
    client = make_client(engine, timeout_ms=50).wait_ready()
    answer = client.recommend(**BODY)
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert "50 ms" in answer.json()["detail"]
    assert engine.running == 0
    longer = client.recommend(**BODY, timeout_ms=120)
    assert "120 ms" in longer.json()["detail"]


def test_a_deadline_counts_from_the_arrival_of_its_batch(
    make_client: Any, tiny_model: ServingModel
) -> None:
    engine = FakeEngine(tiny_model, delay_s=0.1)  # a third of a second for one request
    client = make_client(engine, max_queued_beams=80, max_beam_width=80, max_k=50).wait_ready()
    body = {"requests": [BODY, BODY | {"timeout_ms": 200}, BODY]}
    answer = client.post("/v1/recommendations:batch", json=body)
    assert [one["status"] for one in answer.json()["results"]] == [200, 504, 200]
    assert engine.running == 0


async def offered(
    address: tuple[str, int], per_s: float, seconds: float
) -> tuple[list[int], list[float], float]:
    """Statuses of an open-loop load, times that liveness took meanwhile, and of it all (s)."""
    url = f"http://{address[0]}:{address[1]}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        asked: list[asyncio.Task[httpx.Response]] = []
        alive: list[float] = []
        stop = asyncio.Event()

        async def look() -> None:
            while not stop.is_set():
                began = time.monotonic()
                assert (await client.get("/livez")).status_code == 200
                alive.append(time.monotonic() - began)
                await asyncio.sleep(0.1)

        looking = asyncio.create_task(look())
        began = time.monotonic()
        for number in range(int(per_s * seconds)):
            await asyncio.sleep(max(0.0, began + number / per_s - time.monotonic()))
            asked.append(asyncio.create_task(client.post("/v1/recommendations", json=BODY)))
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
        stop.set()
        await looking
        return statuses, alive, time.monotonic() - began


def test_at_ten_times_capacity_the_rest_is_refused_and_health_stays_quick(
    tiny_context: ServingContext, tiny_model: ServingModel
) -> None:
    """A real server. Five requests fit at once and take 0.6 s: eight and a bit a second."""
    engine = FakeEngine(tiny_model, delay_s=0.2)
    settings = Settings(audit_log="", max_queued_beams=100, max_beam_width=100, max_k=50)
    ready = threading.Event()
    app = create_app(tiny_context, settings, lambda _: engine, on_ready=ready.set)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(10)
            statuses, alive, seconds = asyncio.run(offered(listener.getsockname(), 80, 4))
        finally:
            server.should_exit = True
            thread.join(20)
    assert set(statuses) <= {200, 429, 503, 504}
    assert statuses.count(429) > statuses.count(200)
    assert 0.3 * seconds * 5 / 0.6 <= statuses.count(200) <= seconds * 5 / 0.6 + 5
    assert sorted(alive)[int(0.99 * len(alive))] < 1
    assert engine.running == 0
