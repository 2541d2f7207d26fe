"""Shared fixtures: a tiny catalogue and an application over the fake engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from admin_parts import Parts
from fastapi import FastAPI
from tiny_items import TINY_ITEMS

from gti_core.catalog import ItemCatalog
from gti_core.data.dataset import text_record
from gti_core.prompts import AppendOnlyPrompt
from gti_core.vocabulary import SidVocabulary
from service.app import create_app
from service.context import ServingContext
from service.engine.base import Engine, ServingModel
from service.engine.fake import FakeEngine
from service.settings import Settings

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tiny_catalog() -> ItemCatalog:
    """Twelve items, three levels."""
    return ItemCatalog(TINY_ITEMS)


@pytest.fixture
def tiny_vocabulary() -> SidVocabulary:
    """Three levels with reserved rows; token ids from 16."""
    return SidVocabulary(sizes=(5, 4, 6), active=(4, 3, 4), first_token_id=16)


@pytest.fixture
def tiny_context(tiny_catalog: ItemCatalog, tiny_vocabulary: SidVocabulary) -> ServingContext:
    """A whole bundle's worth of context, built in memory; the prompt reads four items."""
    prompt = AppendOnlyPrompt("Next:", (3, 1, 4), max_history=4, drop=2)
    return ServingContext.build("tiny", "0" * 64, tiny_catalog, tiny_vocabulary, prompt)


@pytest.fixture
def tiny_model(tiny_context: ServingContext) -> ServingModel:
    """The context as a model for the fake engine."""
    return tiny_context.model(Path("unused"))


@pytest.fixture
def fake_engine(tiny_model: ServingModel) -> FakeEngine:
    """A fake engine, not started."""
    return FakeEngine(tiny_model)


class AppClient:
    """An application with its lifespan and an HTTP client, driven from synchronous tests."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.runner = asyncio.Runner()
        self._lifespan = app.router.lifespan_context(app)
        self.runner.run(self._lifespan.__aenter__())
        # Exceptions stay inside the application, as they do behind a real server.
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request."""
        return self.runner.run(self._client.request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """POST."""
        return self.request("POST", path, **options)

    def recommend(self, **body: Any) -> httpx.Response:
        """POST /v1/recommendations."""
        return self.post("/v1/recommendations", json=body)

    def sleep(self, seconds: float) -> None:
        """Let the application's background tasks run."""
        self.runner.run(asyncio.sleep(seconds))

    def wait_ready(self) -> AppClient:
        """Let the engine start; at most five seconds."""
        for _ in range(500):
            if self.get("/readyz").status_code == 200:
                return self
            self.sleep(0.01)
        raise AssertionError(f"not ready: {self.get('/readyz').text}")

    def close(self) -> None:
        """Run the lifespan to its end."""
        self.runner.run(self._client.aclose())
        self.runner.run(self._lifespan.__aexit__(None, None, None))
        self.runner.close()


MakeClient = Callable[..., AppClient]


@pytest.fixture
def make_client(tiny_context: ServingContext) -> Iterator[MakeClient]:
    """Clients of applications; ``make_client(engine, **settings)``. Closed at the end."""
    clients: list[AppClient] = []

    def make(
        engine: Engine | Callable[[Any], Engine],
        /,
        *,
        context: ServingContext | None = None,
        app_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> AppClient:
        build = engine if callable(engine) else lambda _: engine
        app = create_app(
            context or tiny_context,
            # No audit log unless a test asks for one: the data folder is the checkout's.
            Settings(**({"audit_log": ""} | settings)),
            build,
            check_interval_s=0.01,
            **(app_options or {}),
        )
        clients.append(AppClient(app))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(make_client: MakeClient, fake_engine: FakeEngine) -> AppClient:
    """A ready application over the tiny catalogue and the fake engine."""
    return make_client(fake_engine).wait_ready()


@pytest.fixture
def parts(tmp_path: Path, tiny_context: ServingContext) -> Iterator[Parts]:
    parts = Parts(tmp_path, tiny_context)
    yield parts
    parts.store.close()


@pytest.fixture
def working(parts: Parts) -> Iterator[None]:
    """A worker at work in the background."""
    stop = threading.Event()
    thread = threading.Thread(target=parts.worker().run, args=(stop,))
    thread.start()
    yield
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def make_admin(
    make_client: MakeClient, tiny_model: ServingModel, parts: Parts
) -> Callable[..., AppClient]:
    def make(engine: FakeEngine | None = None, **settings: Any) -> AppClient:
        return make_client(
            engine or FakeEngine(tiny_model),
            app_options={"onboarding": parts.onboarding()},
            **settings,
        ).wait_ready()

    return make


@pytest.fixture
def admin(make_admin: MakeClient) -> AppClient:
    return make_admin()


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny catalogue as a whole bundle on disk, over a random tied Llama beside it.

    Read only: tests that change it work on a copy.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from gti_core.backbone import backbone_digest

    folder = tmp_path_factory.mktemp("bundles")
    backbone, bundle = folder / "backbone", folder / "tiny-bundle"
    bundle.mkdir()
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM takes
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    llama = LlamaForCausalLM(config)
    llama.save_pretrained(backbone)
    words = {f"w{number}": number for number in range(15)} | {"<unk>": 15}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(backbone)

    weights = {
        name: tensor.clone() for name, tensor in llama.state_dict().items() if "lm_head" not in name
    }
    save_file(weights, bundle / "adapter.safetensors")
    save_file({"rows_in": torch.randn(15, 32) * 0.3}, bundle / "rows.safetensors")
    save_file({"codebooks": torch.zeros(3, 6, 2)}, bundle / "quantizer.safetensors")
    items = [
        {"item_id": item.item_id, "sid": list(item.sid), "popularity": item.popularity}
        for item in TINY_ITEMS
    ]
    (bundle / "items.json").write_text(json.dumps(items), encoding="utf-8")
    texts = [text_record(item) for item in TINY_ITEMS]
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    (bundle / "texts.jsonl").write_text(lines, encoding="utf-8")
    manifest = {
        "format": "gti-bundle/1",
        "name": "tiny",
        "backbone": {
            "kind": "folder",
            "name": "tiny-llama",
            "path": str(backbone),
            "sha256": backbone_digest(backbone),
        },
        "vocabulary": SidVocabulary((5, 4, 6), (4, 3, 4), 16).to_json(),
        "prompt": AppendOnlyPrompt("Next:", (3, 1, 4), max_history=4, drop=2).to_json(),
        "quantizer": {"kind": "residual-kmeans", "config": {}},
        "tuning": {"mode": "full"},
        "texts": {"kind": "file"},
        "files": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(bundle.iterdir())
        },
    }
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return bundle


@pytest.fixture(autouse=True)
def _no_gti_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must not depend on the GTI_* variables of whoever runs them."""
    for name in os.environ:
        if name.upper().startswith("GTI_"):
            monkeypatch.delenv(name)
