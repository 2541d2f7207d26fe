"""Supervisor: keeps one worker process running beside the service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence

from service.onboarding.worker_process import worker_name
from service.store import Store
from service.store.errors import StoreError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 60.0
GRACE_S = 10.0


class Supervisor:
    """Starts the worker, starts it again when it dies, ends it with the service.

    Args:
        store: takes back the jobs of a worker that died.
        command: what to run; the worker's name and the parent's process id are appended as
            ``--name NAME --parent PID``.
        environment: variables for it, on top of the service's own.
        first_pause_s: seconds before the first restart; each further one waits twice as long.
    """

    def __init__(
        self,
        store: Store,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._store = store
        self._command = list(command)
        self._environment = os.environ | dict(environment)
        self._first_pause_s = first_pause_s
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker, or None while none runs."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def start(self) -> None:
        """Begin to run the worker; returns at once."""
        self._task = asyncio.create_task(self._keep_running(), name="worker")

    async def stop(self) -> None:
        """End the worker; it gets some seconds to give its job back. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _keep_running(self) -> None:
        pause = self._first_pause_s
        while True:
            name, started = worker_name(), time.monotonic()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--name",
                    name,
                    "--parent",
                    str(os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # a Ctrl-C is for the service, which then ends it
                    env=self._environment,
                )
                code = await self._process.wait()
                logger.error("the grounding worker ended with status %d", code)
                await asyncio.to_thread(self._store.jobs.abandon, name)
            except (OSError, StoreError) as error:
                logger.error("the grounding worker: %s", error)
            if time.monotonic() - started > STEADY_S:
                pause = self._first_pause_s
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
