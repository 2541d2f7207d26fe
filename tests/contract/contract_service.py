"""A whole service behind a real socket: uvicorn, the fake engine, a store and a worker's loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from admin_parts import Parts
from tiny_items import TINY_ITEMS

from gti_core.catalog import ItemCatalog
from gti_core.prompts import AppendOnlyPrompt
from gti_core.vocabulary import SidVocabulary
from service.__main__ import _listen
from service.app import create_app
from service.context import ServingContext
from service.engine.fake import FakeEngine
from service.settings import Settings


def roomy_context() -> ServingContext:
    """The tiny catalogue with thousands of reserved codes."""
    prompt = AppendOnlyPrompt("Next:", (3, 1, 4), max_history=4, drop=2)
    vocabulary = SidVocabulary(sizes=(5, 4, 4000), active=(4, 3, 4), first_token_id=16)
    return ServingContext.build("tiny", "0" * 64, ItemCatalog(TINY_ITEMS), vocabulary, prompt)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """Serve until the block ends; gives the address.

    Args:
        folder: holds the store.
    """
    context = roomy_context()
    parts = Parts(folder, context)
    engine = FakeEngine(context.model(folder))
    app = create_app(
        context,
        Settings(audit_log="off"),
        lambda _: engine,
        onboarding=parts.onboarding(),
    )
    stop = threading.Event()
    worker = threading.Thread(target=parts.worker().run, args=(stop,))
    with _listen(Settings(port=0)) as listener:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="on"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        worker.start()
        try:
            deadline = time.monotonic() + 60
            while app.state.runtime.engine is None:
                if time.monotonic() > deadline:
                    raise RuntimeError("the service did not get ready")
                time.sleep(0.02)
            host, port = listener.getsockname()
            yield host, port
        finally:
            server.should_exit = True
            stop.set()
            thread.join(30)
            worker.join(30)
            parts.store.close()
    if thread.is_alive() or worker.is_alive():
        raise RuntimeError("the service did not end")
