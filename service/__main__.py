"""Composition root: the one place that picks an engine. ``python -m service`` is ``gti``."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import sys
from typing import TYPE_CHECKING, ClassVar

import typer
import uvicorn

from gti_core.bundle import DEMO_BUNDLE, load_bundle, materialize, tokenizer_folder
from gti_core.bundle.delta import CatalogState
from gti_core.errors import GtiError
from service.access.start import check_access
from service.app import create_app
from service.context import ServingContext
from service.draining import DrainingServer
from service.engine.base import Engine, ServingModel
from service.logs import configure_logging
from service.onboarding.running import Onboarding
from service.onboarding.supervisor import Supervisor
from service.onboarding.worker_process import open_store
from service.runtime import BuildEngine, LoadEncoder, Progress
from service.search import QueryEncoder
from service.settings import (
    KEY_VARIABLE,
    WORKER_SETTINGS,
    Settings,
    env_name,
    flag,
    unknown_variables,
)

if TYPE_CHECKING:
    from gti_core.bundle import Bundle

logger = logging.getLogger("gti")

CLOSE_TIMEOUT_S = 2


class StartError(GtiError):
    """The service can't start, or had to end."""

    code: ClassVar[str] = "start_failed"


def run(settings: Settings) -> None:
    """Serve until stopped.

    Raises:
        StartError: the address can't be used, the data folder can't be written, the engine did
            not start or died.
        BundleError: the bundle is missing, unknown or corrupt.
        StoreError: the store can't be used, or belongs to another bundle.
        AccessError, KeysError, AuditError: callers need keys and there is none, or the files of
            keys or audit log can't be used.
    """
    configure_logging(settings.log_level, settings.log_format)
    for name in unknown_variables():
        logger.warning("%s is set but is no setting of the service; see gti serve --help", name)
    # First what fails fast: the address and the bundle, then the model behind a live server.
    listener = _listen(settings)
    try:
        _make_data_dir(settings)
        check_access(settings)
        bundle = load_bundle(settings.bundle or DEMO_BUNDLE)
        context = ServingContext.from_bundle(bundle)
        _serve(
            settings,
            context,
            engine_builder(settings, bundle, context),
            listener,
            encoder_loader(settings, bundle),
            onboarding(settings, bundle, context),
        )
    finally:
        listener.close()


def engine_builder(settings: Settings, bundle: Bundle, context: ServingContext) -> BuildEngine:
    """How to make the engine that the settings name. Imports its library only when called."""

    def build(progress: Progress) -> Engine:
        if settings.engine == "fake":
            from service.engine.fake import FakeEngine

            return FakeEngine(context.model(bundle.path))
        progress("looking for the merged model")
        model = context.model(materialize(bundle, settings.cache_dir, progress))
        progress(f"loading the {settings.engine} engine")
        if settings.engine == "reference":
            from service.engine.reference import ReferenceEngine

            return ReferenceEngine(model)
        from service.engine.vllm_start import VllmOptions

        options = VllmOptions(
            dtype=settings.vllm_dtype,
            gpu_memory_utilization=settings.vllm_gpu_memory_utilization,
            kv_cache_gib=settings.vllm_kv_cache_gib,
            max_num_seqs=settings.vllm_max_num_seqs,
            scratch_blocks=settings.vllm_scratch_blocks,
        )
        if settings.engine == "vllm-per-beam":
            from service.engine.vllm_per_beam import VllmPerBeamEngine

            return VllmPerBeamEngine(model, options)
        from service.engine.vllm_engine import VllmEngine

        return VllmEngine(model, options)

    return build


def encoder_loader(settings: Settings, bundle: Bundle) -> LoadEncoder | None:
    """How to load the tokenizer for search queries; None when the bundle has no search."""
    search = bundle.search
    if search is None:
        return None
    return lambda: QueryEncoder.load(
        tokenizer_folder(bundle, settings.cache_dir), search, bundle.vocabulary
    )


def onboarding(settings: Settings, bundle: Bundle, context: ServingContext) -> Onboarding:
    """Versions and jobs as the settings say. Raises StoreError."""
    store = open_store(settings.store_url, bundle, restore=True)
    wanted = settings.grounding_worker
    if wanted is None:
        wanted = settings.engine != "fake" and "encoder" in bundle.manifest
    supervisor = None
    if wanted:
        command = [sys.executable, "-m", "service.cli", "worker"]
        supervisor = Supervisor(store, command, _worker_environment(settings))
    base = CatalogState(context.catalog, context.vocabulary, context.index)
    return Onboarding(store, base, supervisor=supervisor)


def _worker_environment(settings: Settings) -> dict[str, str]:
    # Not on the command line, which others on the machine can read: a URL may hold a password.
    given = {
        env_name(name): str(value)
        for name in WORKER_SETTINGS
        if (value := getattr(settings, name)) is not None
    }
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | given


def _serve(
    settings: Settings,
    context: ServingContext,
    build_engine: BuildEngine,
    listener: socket.socket,
    load_encoder: LoadEncoder | None = None,
    onboarding: Onboarding | None = None,
) -> None:
    url = _url(settings.host, listener)
    server: DrainingServer

    def stop() -> None:
        server.should_exit = True

    def ready() -> None:
        engine = app.state.runtime.engine
        typer.echo(welcome(context.name, engine.model, url, keyed=settings.auth_on))

    app = create_app(
        context,
        settings,
        build_engine,
        load_encoder=load_encoder,
        onboarding=onboarding,
        on_ready=ready,
        on_failed=stop,
    )
    server = DrainingServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            # Who needs no key must not choose the address that limits and the audit log go by.
            proxy_headers=settings.auth_on,
            lifespan="on",
            # The requests are done by then; this is for connections that a client keeps open.
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        ),
        app.state.runtime.drain,
    )
    logger.info("listening on %s; the engine is loading", url)
    # The server drains on SIGTERM, then raises it again: by then all is done, so the exit is 0.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        logger.info("stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
    failure = app.state.runtime.failure
    if failure is not None:
        raise StartError(failure)


def welcome(name: str, model: ServingModel, url: str, *, keyed: bool = False) -> str:
    """What `gti serve` prints when it is ready: addresses and a first request to paste."""
    films = model.popular[:3]
    k = max(1, min(10, len(model.popular) - len(films)))
    body = json.dumps({"history": [film.item_id for film in films], "k": k})
    key = f'-H "Authorization: Bearer ${KEY_VARIABLE}" ' if keyed else ""
    titles = ", ".join(film.title or film.item_id for film in films)
    return (
        f"\nGTI Serve is ready: {url}   API docs: {url}/docs\n"
        f"{len(model.popular)} items of bundle {name}, version {model.version}. "
        f"Recommend after {titles}:\n\n"
        f"  curl -s {url}/v1/recommendations -H 'Content-Type: application/json' "
        f"{key}-d {shlex.quote(body)}\n"
    )


def _listen(settings: Settings) -> socket.socket:
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartError(
            f"can't listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            f"choose another with {flag('port')} or {env_name('port')}"
        ) from error
    return listener


def _make_data_dir(settings: Settings) -> None:
    try:
        settings.cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"can't write to {settings.data_dir}: {error.strerror or error}; choose another "
            f"folder with {flag('data_dir')} or {env_name('data_dir')}"
        ) from error


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    return f"http://{reachable}:{port}"


def _end(signum: int, frame: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    from service.cli import main

    main()
