"""The composition root and a real HTTP server, in this process."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from gti_core.bundle import load_bundle
from service.__main__ import StartError, _listen, _serve, _url, engine_builder, welcome
from service.app import create_app
from service.context import ServingContext
from service.engine.base import Engine, ServingModel
from service.engine.fake import FakeEngine
from service.settings import Settings


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with _listen(Settings(port=0)) as listener:
        yield listener


def test_engine_that_does_not_start_ends_the_process(
    tiny_context: ServingContext, tiny_model: ServingModel, listener: socket.socket
) -> None:
    engine = FakeEngine(tiny_model, start_error="no weights")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StartError, match="the engine did not start: no weights"):
        _serve(Settings(), tiny_context, lambda _: engine, listener)
    assert signal.getsignal(signal.SIGTERM) is before


def test_engine_that_dies_ends_the_process(
    tiny_context: ServingContext,
    tiny_model: ServingModel,
    listener: socket.socket,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakeEngine(tiny_model)

    def build(_: Any) -> Engine:
        threading.Timer(0.3, engine.kill).start()
        return engine

    started = time.monotonic()
    with pytest.raises(StartError, match="the engine is gone"):
        _serve(Settings(), tiny_context, build, listener)
    assert time.monotonic() - started < 5
    assert "GTI Serve is ready" in capsys.readouterr().out


def test_welcome_names_known_popular_items(tiny_model: ServingModel) -> None:
    text = welcome("tiny", tiny_model, "http://127.0.0.1:8000")
    assert "Recommend after Gamma, Mu, Zeta:" in text
    [command] = [line for line in text.splitlines() if "curl" in line]
    assert json.loads(shlex.split(command)[6]) == {"history": ["a3", "50", "c1"], "k": 9}


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("::1", "[::1]"),
        ("localhost", "localhost"),
    ],
)
def test_url_can_be_opened(host: str, shown: str, listener: socket.socket) -> None:
    assert _url(host, listener) == f"http://{shown}:{listener.getsockname()[1]}"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_closed_connection_frees_the_engine(
    tiny_context: ServingContext, tiny_model: ServingModel, listener: socket.socket
) -> None:
    """A real server, every middleware on: the work ends long before it would be done."""
    engine = FakeEngine(tiny_model, delay_s=5)
    ready = threading.Event()
    app = create_app(tiny_context, Settings(), lambda _: engine, on_ready=ready.set)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert ready.wait(10)
        body = b'{"history": ["a1"]}'
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(
                b"POST /v1/recommendations HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            until(lambda: engine.running == 1)
        closed = time.monotonic()
        until(lambda: engine.running == 0)
        assert time.monotonic() - closed < 2
        assert engine.finished == 0
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("engine", ["fake", "reference"])
def test_engine_that_the_settings_name(
    make_client: Any, tiny_bundle: Path, tmp_path: Path, engine: str
) -> None:
    """From a bundle on disk to an answer: merge, load, search."""
    settings = {"engine": engine, "data_dir": tmp_path, "bundle": tiny_bundle}
    bundle = load_bundle(tiny_bundle)
    context = ServingContext.from_bundle(bundle)
    client = make_client(
        engine_builder(Settings(**settings), bundle, context), context=context, **settings
    )
    for _ in range(600):
        if client.get("/readyz").status_code == 200:
            break
        client.sleep(0.1)
    assert client.get("/v1/info").json()["engine"]["name"] == engine
    assert client.get("/v1/info").json()["bundle"] == {"name": "tiny", "digest": bundle.digest}
    assert client.get("/v1/items/a1").json()["title"] == "Alpha"
    body = client.recommend(history=["a1", "c1"], k=12, beam_width=40).json()
    assert len(body["items"]) == 10
    scores = [item["score"] for item in body["items"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 10
    assert [path.name for path in tmp_path.iterdir()] == (["cache"] if engine != "fake" else [])


def test_backbone_that_is_gone_is_named(
    make_client: Any, tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny_bundle)
    bundle.manifest["backbone"]["path"] = "/nowhere"
    context = ServingContext.from_bundle(bundle)
    settings = Settings(engine="reference", data_dir=tmp_path)
    client = make_client(engine_builder(settings, bundle, context), context=context)
    for _ in range(600):
        if client.app.state.runtime.failure:
            break
        client.sleep(0.1)
    assert "backbone folder /nowhere" in client.app.state.runtime.failure
