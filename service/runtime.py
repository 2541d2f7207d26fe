"""Runtime: one engine's life inside the service, from loading to the end.

::

    starting ──> ready ──> stopping
        └──────────┴────> failed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from gti_core.errors import GtiError
from service import __version__
from service.admission import Admission
from service.context import ServingContext
from service.draining import WorkCount
from service.engine.base import Engine, EngineDeadError, EngineError, ServingModel
from service.engine.timings import Load
from service.errors import AdminDisabledError, not_ready
from service.onboarding.admin import Admin
from service.onboarding.running import Onboarding
from service.recommender import Recommender
from service.search import QueryEncoder
from service.settings import Settings
from service.store.store import StoreSummary
from service.store.workers import WorkerCounts
from service.telemetry.facts import Facts
from service.telemetry.store_watch import StoreWatch
from service.telemetry.telemetry import Telemetry

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
BuildEngine = Callable[[Progress], Engine]
"""Makes an engine, not started yet. Runs in a thread; may be slow; reports what it does."""
LoadEncoder = Callable[[], QueryEncoder]
"""Loads the tokenizer for search queries. Runs in a thread, after the engine was made."""

CHECK_INTERVAL_S = 1.0
_T = TypeVar("_T")


class State(StrEnum):
    """Where the runtime stands."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"


class Runtime:
    """Starts an engine beside the running server, watches it and stops it.

    Args:
        context: what is served.
        settings: the service's settings.
        build_engine: makes the engine.
        load_encoder: loads the tokenizer; called only if ``context`` has a search template.
        onboarding: versions and jobs; None: the base is served for ever.
        telemetry: counts and traces; None: a new one without traces.
        on_ready: called once, on the event loop, when requests can be served.
        on_failed: called once, on the event loop, when the engine could not start or has died.
        check_interval_s: seconds between looks at the engine's health.

    Raises:
        ValueError: the context has a search template, but there is no ``load_encoder``.
    """

    def __init__(
        self,
        context: ServingContext,
        settings: Settings,
        build_engine: BuildEngine,
        *,
        load_encoder: LoadEncoder | None = None,
        onboarding: Onboarding | None = None,
        telemetry: Telemetry | None = None,
        on_ready: Callable[[], None] = lambda: None,
        on_failed: Callable[[], None] = lambda: None,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        if context.search is not None and load_encoder is None:
            raise ValueError("search needs a tokenizer")
        self.context = context
        self.settings = settings
        self.state = State.STARTING
        self.progress = "starting"
        self.failure: str | None = None
        self.telemetry = telemetry or Telemetry()
        self._build_engine = build_engine
        self._load_encoder = load_encoder
        self._onboarding = onboarding
        self._store = None if onboarding is None else StoreWatch(onboarding.summary)
        self._engine_labels: tuple[Engine, dict[str, str]] | None = None
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._check_interval_s = check_interval_s
        self._engine: Engine | None = None
        self._recommender: Recommender | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self.work = WorkCount()
        self.admission = Admission(
            settings.max_queued_beams,
            settings.max_queued_tokens,
            settings.max_beam_width,
            settings.max_queue_ms / 1000,
        )

    async def start(self) -> None:
        """Begin to load the engine; returns at once."""
        self._task = asyncio.create_task(self._run(), name="engine")

    async def drain(self) -> None:
        """Refuse new work, and wait until what was accepted is done, at most as long as set."""
        if self.state is not State.FAILED:
            self.state = State.STOPPING
        if not await self.work.drain(self.settings.shutdown_timeout_s):
            logger.warning("%d requests are given up", self.work.under_way)

    async def stop(self) -> None:
        """Stop the engine and free everything. Idempotent."""
        if self.state is not State.FAILED:
            self.state = State.STOPPING
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._onboarding is not None:
            await self._onboarding.stop()
        if self._ending is not None:
            with contextlib.suppress(Exception):
                await self._ending
        if self._engine is not None:
            await self._engine.stop()

    @property
    def engine(self) -> Engine | None:
        """The engine, or None while it is not ready."""
        return self._engine if self.state is State.READY else None

    @property
    def served(self) -> ServingModel | ServingContext:
        """The version being served; the base while there is no engine."""
        return self.context if self._engine is None else self._engine.model

    def admin(self) -> Admin:
        """What the admin routes do.

        Raises:
            AdminDisabledError: the service has no admin routes.
            NotReadyError, EngineDeadError: as `recommender`.
        """
        reason = self._why_no_admin()
        if reason is not None:
            raise AdminDisabledError(reason)
        self.recommender()
        return self._ready_admin()

    async def wait_for_version(self, version: int, timeout_s: float | None = None) -> int:
        """Wait for a version with at least this number; returns the one served.

        Args:
            version: the least number wanted.
            timeout_s: seconds to wait at most; None: as long as the settings say.
        """
        served = self.served.version
        if served >= version or self._onboarding is None:
            return served
        wait_s = self.settings.min_version_wait_s if timeout_s is None else timeout_s
        return await self._ready_admin().wait_for_version(version, wait_s)

    async def codes_left(self) -> int:
        """How many more items can be onboarded, as far as is known. Raises StoreError."""
        if self._onboarding is None or self._onboarding.admin is None:
            return self.served.vocabulary.reserved(self.served.vocabulary.levels - 1)
        return await self._onboarding.admin.codes_left()

    async def workers(self) -> WorkerCounts:
        """Grounding workers, as far as is known. Raises StoreError."""
        if self._onboarding is None or self._onboarding.admin is None:
            return WorkerCounts(0, 0)
        return await self._onboarding.admin.workers()

    async def facts(self) -> Facts:
        """How things stand, for metrics. Never waits long, whatever hangs."""
        served, engine = self.served, self.engine
        if self._store is None:
            left = served.vocabulary.reserved(served.vocabulary.levels - 1)
            store: StoreSummary | None = StoreSummary({}, left, WorkerCounts(0, 0))
        else:
            store = await self._store.latest()
        return Facts(
            engine_up=engine is not None,
            version=None if engine is None else engine.model.version,
            items=len(served.catalog),
            in_service=served.index.base.total,
            load=Load(0, 0) if engine is None else engine.load(),
            beams=self.admission.beam_rows,
            store=store,
            build={
                "version": __version__,
                "bundle": self.context.name,
                **self._labels(engine),
            },
        )

    def _labels(self, engine: Engine | None) -> dict[str, str]:
        if engine is None:
            return {"engine": self.settings.engine, "vllm_version": ""}
        if self._engine_labels is None or self._engine_labels[0] is not engine:
            vllm = str(engine.info().get("vllm_version", ""))
            self._engine_labels = engine, {"engine": engine.name, "vllm_version": vllm}
        return self._engine_labels[1]

    def _ready_admin(self) -> Admin:
        if self._onboarding is None or self._onboarding.admin is None:
            raise RuntimeError("ready, but not following the store")
        return self._onboarding.admin

    def _why_no_admin(self) -> str | None:
        if not self.settings.admin:
            return "the service runs with --no-admin"
        if self._onboarding is None:
            return "the service runs without a store"
        return None

    def recommender(self) -> Recommender:
        """The recommender.

        Raises:
            NotReadyError: still loading, or stopping.
            EngineDeadError: the engine has failed.
        """
        if self.state is State.READY and self._recommender is not None:
            return self._recommender
        if self.state is State.FAILED:
            raise EngineDeadError(self.failure or "the engine has failed")
        raise not_ready(
            self.progress if self.state is State.STARTING else "the service is stopping",
            self.state.value,
        )

    def require_started(self) -> None:
        """Raise NotReadyError or EngineDeadError unless the engine was ready once."""
        if self._recommender is None:
            self.recommender()

    def ready_version(self) -> int:
        """The version that is ready to be served, as the last look at the engine says.

        Raises:
            NotReadyError: still loading, or stopping.
            EngineDeadError: the engine is gone.
        """
        self.recommender()
        return self.served.version

    async def _look(self) -> None:
        """One look at the engine, which may take as long as an engine may be silent."""
        if self._engine is None:
            raise EngineDeadError("there is no engine")
        try:
            await self._engine.check()
        except EngineDeadError as error:
            self._fail(f"the engine is gone: {error}")

    async def _run(self) -> None:
        try:
            self._engine = await in_daemon_thread(lambda: self._build_engine(self._report))
            encoder = None
            if self.context.search is not None and self._load_encoder is not None:
                self._report("loading the tokenizer")
                encoder = await in_daemon_thread(self._load_encoder)
            if self._onboarding is not None:
                # It has much to load too, and the backbone lies in the cache by now.
                self._onboarding.start_worker()
            self._report(f"starting the {self._engine.name} engine")
            await self._engine.start()
            if self._onboarding is not None:
                self._report("catching up with the store")
                await self._onboarding.start(self._engine, self.telemetry)
            # The welcome and the first fallback want it; sorting a large catalogue takes a while.
            model = self._engine.model
            await in_daemon_thread(lambda: model.popular)
        except (EngineError, GtiError, OSError) as error:
            self._fail(f"the engine did not start: {error}")
            return
        except Exception as error:
            logger.exception("starting the engine failed")
            self._fail(f"the engine did not start: {type(error).__name__}: {error}")
            return
        self._recommender = Recommender(
            self._engine,
            self.context.prompt,
            encoder,
            self.admission,
            self.telemetry.meters.illegal,
        )
        self.state = State.READY
        logger.info(
            "ready: bundle %s, version %d, %d items",
            self.context.name,
            self.served.version,
            len(self.served.catalog),
        )
        try:
            self._on_ready()
        except OSError:
            logger.warning("could not say that the service is ready: standard output is closed")
        while self.state is State.READY:
            await asyncio.sleep(self._check_interval_s)
            try:
                await self._look()
            except Exception:
                logger.exception("looking at the engine's health failed")

    def _report(self, message: str) -> None:
        # Called from the loading thread too: one attribute write, read by /readyz.
        self.progress = message
        logger.info("%s", message)

    def _fail(self, message: str) -> None:
        if self.state in (State.FAILED, State.STOPPING):
            return
        self.state = State.FAILED
        self.failure = message
        logger.error("%s", message)
        if self._engine is not None:
            # Requests under way learn of it now; a stopped process would keep them waiting.
            self._ending = asyncio.create_task(self._engine.stop(), name="end-engine")
        self._on_failed()


async def in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Run blocking work off the event loop, in a thread that can't keep the process alive.

    Loading takes long and can't be interrupted; an executor's thread would hold up Ctrl-C.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result, error = work(), None
        except Exception as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="load-engine").start()
    return await future
