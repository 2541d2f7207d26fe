"""The worker as a process: low priority, ends with whoever started it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gti_core.bundle.delta import CatalogState
from gti_core.bundle.format import Bundle
from gti_core.onboarding.proposal import Grounder
from service.onboarding.states import States
from service.onboarding.worker import Worker
from service.store import Store
from service.store.errors import StoreError

logger = logging.getLogger(__name__)

NICENESS = 5
"""Of worker and session. At 0 requests waited for seconds while items were grounded; at 10 a job
beside constant load took twelve times as long as alone."""
PARENT_POLL_S = 0.5
BEAT_S = 3.0


def worker_name() -> str:
    """A name that no other worker has."""
    return f"{socket.gethostname()[:80]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def open_store(url: str, bundle: Bundle, *, restore: bool = False) -> Store:
    """The store of a bundle; ``restore`` as in `Store`. Raises StoreError."""
    return Store(url, bundle.name, bundle.digest, bundle.vocabulary, restore=restore)


def work(
    store: Store,
    bundle: Bundle,
    grounder: Grounder,
    *,
    name: str | None = None,
    parent: int | None = None,
    lease_s: float | None = None,
) -> None:
    """Load the grounder and work until SIGTERM or SIGINT, or until the parent is gone.

    Args:
        store: holds the jobs.
        bundle: the base version.
        grounder: the science.
        name: the worker's name; None makes one up.
        parent: process id of the parent to end with; None: run alone.
        lease_s: see `Worker`.

    Raises:
        GtiError: the grounder can't be loaded.
    """
    step_back()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    if parent is not None:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    name = name or worker_name()
    with presence(store, name) as ready:
        grounder.load()
        states = States(store, CatalogState.of(bundle.catalog, bundle.vocabulary))
        options = {} if lease_s is None else {"lease_s": lease_s}
        worker = Worker(store, states, grounder, name, **options)
        logger.info("the worker is ready")
        ready()
        worker.run(threading.Event())


def step_back() -> None:
    """Let the engine go first: its threads wait for each other, so each pause is one for all."""
    os.nice(NICENESS)
    # Sessions share the processors evenly whatever the niceness of their processes, and the worker
    # has a session of its own.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS), encoding="ascii")


@contextmanager
def presence(store: Store, name: str, every_s: float = BEAT_S) -> Iterator[Callable[[], None]]:
    """Let the store know that a worker is there, while the block lasts.

    Args:
        store: the store.
        name: the worker's name.
        every_s: seconds between two signs of life.

    Yields:
        To be called once the worker takes jobs.
    """
    ready, ended, now = threading.Event(), threading.Event(), threading.Event()

    def beat() -> None:
        broken = False
        while True:
            now.clear()
            if ended.is_set():
                return
            try:
                store.workers.beat(name, ready=ready.is_set())
                broken = False
            except StoreError as error:
                if not broken:
                    logger.warning("the service can't be told that the worker is there: %s", error)
                broken = True
            now.wait(every_s)

    def is_ready() -> None:
        ready.set()
        now.set()

    thread = threading.Thread(target=beat, name="presence", daemon=True)
    thread.start()
    try:
        yield is_ready
    finally:
        ended.set()
        now.set()
        thread.join(BEAT_S)
        with suppress(StoreError):
            store.workers.leave(name)


def _end(signum: int, frame: object) -> None:
    raise SystemExit(0)


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(PARENT_POLL_S)
    logger.info("the service is gone: the worker ends")
    os.kill(os.getpid(), signal.SIGTERM)
