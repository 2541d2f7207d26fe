"""The routes around recommendations, errors, request ids, body limit, readiness."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.engine.base import EngineError, PromptTooLongError, ServingModel
from service.engine.fake import FakeEngine
from service.runtime import State


def assert_problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["code"] == code
    assert problem["type"] == f"urn:gti-serve:error:{code}"
    assert problem["request_id"] == response.headers["x-request-id"]
    assert problem["title"]
    assert problem["detail"]
    return problem


def test_item(client: Any) -> None:
    assert client.get("/v1/items/a1").json() == {
        "item_id": "a1",
        "title": "Alpha",
        "description": "First.",
        "attributes": {"year": 1990, "genres": ["Drama"]},
        "semantic_id": [0, 0, 0],
        "popularity": 50,
        "available": True,
    }
    assert client.get("/v1/items/e%2F1").json()["item_id"] == "e/1"


@pytest.mark.parametrize("item_id", ["nope", "a1%00", "%F0%9F%98%80", "a1/x", "-1"])
def test_unknown_item(client: Any, item_id: str) -> None:
    assert_problem(client.get(f"/v1/items/{item_id}"), 404, "item_not_found")


def test_item_id_too_long(client: Any) -> None:
    assert_problem(client.get("/v1/items/" + "x" * 257), 422, "validation_failed")


def test_info(client: Any) -> None:
    info = client.get("/v1/info").json()
    assert info["name"] == "gti-serve"
    assert info["service_version"] == "0.1.0"
    assert info["bundle"] == {"name": "tiny", "digest": "0" * 64}
    assert info["engine"]["name"] == "fake"
    assert info["state"] == "ready"
    assert info["version"] == 1
    assert info["catalog"] == {
        "items": 12,
        "levels": 3,
        "active_codes": [4, 3, 4],
        "reserved_codes": [1, 1, 2],
        "codes_left": 2,
    }
    assert info["limits"] == {
        "max_k": 200,
        "default_beam_width": 20,
        "max_beam_width": 256,
        "max_history": 1000,
        "max_listed": 10_000,
        "max_batch": 100,
        "prompt_history": 4,
        "max_body_bytes": 1048576,
        "max_queued_beams": 2048,
        "max_queued_tokens": 131_072,
        "timeout_ms": 10_000,
    }


@pytest.mark.parametrize("path", ["/", "/v1/recommendation", "/v1/recommendations/", "/v2/info"])
def test_unknown_path(client: Any, path: str) -> None:
    assert_problem(client.get(path), 404, "not_found")


def test_wrong_method(client: Any) -> None:
    response = client.get("/v1/recommendations")
    assert_problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    assert_problem(client.post("/v1/info"), 405, "method_not_allowed")


def test_request_id_is_kept_or_made(client: Any) -> None:
    for path in ("/livez", "/nothing"):
        given = client.get(path, headers={"X-Request-ID": "abc-1.2_Z"})
        assert given.headers["x-request-id"] == "abc-1.2_Z"
    for bad in ("", "x" * 129, "a b", 'a"b', "a/b"):
        made = client.get("/livez", headers={"X-Request-ID": bad}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32


def test_access_line_names_the_request(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gti.access"):
        client.get("/v1/items/x%0Aforged", headers={"X-Request-ID": "r1"})
        client.get("/livez")
    records = [record for record in caplog.records if record.name == "gti.access"]
    assert [record.getMessage().split(" ")[:3] for record in records] == [
        ["GET", "/v1/items/x%0Aforged", "404"]
    ]


def test_body_limit(make_client: Any, fake_engine: FakeEngine) -> None:
    client = make_client(fake_engine, max_body_bytes=2000).wait_ready()
    fits = json.dumps({"history": ["a1"]}).encode().ljust(2000)
    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/recommendations", content=fits, headers=headers).status_code == 200
    over = client.post("/v1/recommendations", content=fits + b" ", headers=headers)
    assert_problem(over, 413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, 2001, 100):
            yield (fits + b" ")[start : start + 100]

    undeclared = client.post("/v1/recommendations", content=chunks(), headers=headers)
    assert "content-length" not in undeclared.request.headers
    assert_problem(undeclared, 413, "body_too_large")
    lying = client.post("/v1/info", content=fits, headers={"Content-Length": "9" * 5000})
    assert_problem(lying, 413, "body_too_large")


def test_not_ready_while_loading(make_client: Any, tiny_model: ServingModel) -> None:
    client = make_client(FakeEngine(tiny_model, start_delay_s=60))
    client.sleep(0.05)
    assert client.get("/livez").json() == {"status": "ok"}
    for response in (client.get("/readyz"), client.recommend(history=["a1"])):
        problem = assert_problem(response, 503, "not_ready")
        assert problem["state"] == "starting"
        assert problem["detail"] == "starting the fake engine"
        assert response.headers["retry-after"] == "5"
    info = client.get("/v1/info").json()
    assert (info["state"], info["engine"], info["version"]) == ("starting", None, None)
    assert client.get("/v1/items/a1").status_code == 200


def test_ready(make_client: Any, fake_engine: FakeEngine) -> None:
    calls: list[str] = []
    client = make_client(fake_engine, app_options={"on_ready": lambda: calls.append("ready")})
    client.wait_ready()
    assert client.get("/readyz").json() == {"status": "ok", "state": "ready", "version": 1}
    assert calls == ["ready"]


def test_failed_start(make_client: Any, tiny_model: ServingModel) -> None:
    calls: list[str] = []
    client = make_client(
        FakeEngine(tiny_model, start_error="no weights"),
        app_options={"on_failed": lambda: calls.append("failed")},
    )
    client.sleep(0.05)
    assert calls == ["failed"]
    assert client.app.state.runtime.failure == "the engine did not start: no weights"
    assert client.get("/livez").status_code == 200
    assert_problem(client.get("/readyz"), 503, "engine_dead")


@pytest.mark.parametrize("error", [ZeroDivisionError("inside"), OSError("disk")])
def test_failed_build(make_client: Any, error: Exception) -> None:
    def build(_: Any) -> FakeEngine:
        raise error

    client = make_client(build)
    client.sleep(0.05)
    assert client.app.state.runtime.state is State.FAILED
    assert str(error) in client.app.state.runtime.failure


def test_stop_while_building(make_client: Any, fake_engine: FakeEngine) -> None:
    import threading

    release = threading.Event()

    def build(_: Any) -> FakeEngine:
        release.wait(10)
        return fake_engine

    client = make_client(build)
    client.sleep(0.02)
    client.runner.run(client.app.state.runtime.stop())
    assert_problem(client.get("/readyz"), 503, "not_ready")
    assert client.get("/readyz").json()["state"] == "stopping"
    release.set()
    client.sleep(0.02)


def test_engine_dies(make_client: Any, tiny_model: ServingModel) -> None:
    calls: list[str] = []
    engine = FakeEngine(tiny_model, delay_s=0.05)
    client = make_client(
        engine, app_options={"on_failed": lambda: calls.append("failed")}
    ).wait_ready()

    async def recommend_then_kill() -> httpx.Response:
        running = asyncio.create_task(
            client._client.post("/v1/recommendations", json={"history": ["a1"]})
        )
        await asyncio.sleep(0.02)
        engine.kill()
        return await running

    in_flight = client.runner.run(recommend_then_kill())
    problem = assert_problem(in_flight, 503, "engine_dead")
    assert "fake" not in problem["detail"]
    client.sleep(0.1)
    assert calls == ["failed"]
    assert_problem(client.get("/readyz"), 503, "engine_dead")
    assert_problem(client.recommend(history=["a1"]), 503, "engine_dead")
    assert client.get("/livez").status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("secret path"), 503, "engine_error"),
        (PromptTooLongError("too long by 7"), 422, "prompt_too_long"),
        (KeyError("secret path"), 500, "internal_error"),
    ],
)
def test_errors_of_the_engine(
    make_client: Any, fake_engine: FakeEngine, error: Exception, status: int, code: str
) -> None:
    async def fail(_: Any) -> Any:
        raise error

    client = make_client(fake_engine).wait_ready()
    fake_engine.decode = fail  # type: ignore[method-assign]
    response = client.recommend(history=["a1"])
    assert_problem(response, status, code)
    assert "secret" not in response.text
    assert "Traceback" not in response.text


def test_client_that_leaves_frees_the_engine(make_client: Any, tiny_model: ServingModel) -> None:
    engine = FakeEngine(tiny_model, delay_s=0.2)
    client = make_client(engine).wait_ready()
    sent: list[Any] = []
    left = asyncio.Event()

    async def leave() -> int:
        body = [{"type": "http.request", "body": b'{"history": ["a1"]}', "more_body": False}]

        async def receive() -> Any:
            if body:
                return body.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/recommendations",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        serving = asyncio.create_task(client.app(scope, receive, send))
        await asyncio.sleep(0.05)
        running = engine.running
        left.set()
        await asyncio.wait_for(serving, 0.1)
        await asyncio.sleep(0.01)
        return running

    assert client.runner.run(leave()) == 1
    assert engine.running == 0
    assert engine.finished == 0
    assert sent[0]["status"] == 499


def test_same_request_id_twice_at_a_time(make_client: Any, tiny_model: ServingModel) -> None:
    """An engine must see distinct ids even if clients send one id twice."""
    engine = FakeEngine(tiny_model, delay_s=0.01)
    client = make_client(engine).wait_ready()
    seen: list[str] = []
    decode = engine.decode

    async def spy(request: Any) -> Any:
        seen.append(request.request_id)
        return await decode(request)

    engine.decode = spy  # type: ignore[method-assign]

    async def both() -> list[httpx.Response]:
        post = client._client.post
        options: Any = {"json": {"history": ["a1"]}, "headers": {"X-Request-ID": "same"}}
        return list(
            await asyncio.gather(*(post("/v1/recommendations", **options) for _ in range(2)))
        )

    answers = client.runner.run(both())
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(set(seen)) == 2
    assert all(request_id.startswith("same-") for request_id in seen)


def test_the_docs_page_loads_nothing_from_elsewhere(client: Any) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assets = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(assets) >= 3
    for asset in assets:
        assert asset.startswith("/docs-static/"), asset
        assert client.get(asset).status_code == 200
    assert client.get("/openapi.json").json()["info"]["title"] == "GTI Serve"
