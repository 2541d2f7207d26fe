"""What the vLLM engines share: one engine process, its life and its health."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from gti_core.bundle.delta import Rows
from gti_core.types import JsonDict
from service.engine.base import (
    CatalogChange,
    DecodeRequest,
    EngineDeadError,
    EngineError,
    PromptTooLongError,
    ServingModel,
)
from service.engine.timings import Load
from service.engine.vllm_start import RunningVllm, VllmOptions, build, installed_version

_T = TypeVar("_T")

_CHECK_TURN_S = 0.25
_BUSY_SHARE = 0.02
"""Least processor seconds per second of silence that tell a busy process from a stopped one."""


class VllmProcess(ABC):
    """A vLLM engine in a process of its own. See `service.engine.base.Engine`.

    Start, decode and stop must happen in one event loop.

    Args:
        model: the version to serve.
        options: how to run vLLM.
    """

    def __init__(self, model: ServingModel, options: VllmOptions | None = None) -> None:
        self._model = model
        self._options = options or VllmOptions()
        self._llm: Any = None
        self._process: RunningVllm | None = None
        self._max_model_len = 0
        self._vocab_size = 0
        self._facts: JsonDict = {}
        self._lifecycle = asyncio.Lock()
        self._probe: asyncio.Task[bool] | None = None
        self._probe_began = 0.0
        self._stuck = False
        self._serial = itertools.count()
        """Makes request ids unique."""
        self._background: set[asyncio.Future[Any]] = set()
        self._pending: set[asyncio.Task[Any]] = set()

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the engine."""

    @property
    def model(self) -> ServingModel:
        """The current version."""
        return self._model

    def _arguments(self) -> Mapping[str, Any]:
        """Further arguments of vLLM's engine."""
        return {}

    @abstractmethod
    async def publish(
        self,
        model: ServingModel,
        *,
        rows: Rows | None = None,
        change: CatalogChange | None = None,
    ) -> None:
        """See `service.engine.base.Engine.publish`."""

    @abstractmethod
    async def _first_request(self, llm: Any) -> None:
        """One request, which binds the engine to this loop. Raises EngineError."""

    async def start(self) -> None:
        """Load the model in a new process; the event loop stays free. A second call does nothing.

        Raises:
            EngineError: vLLM is missing, of an untested version, or can't load the model.
        """
        async with self._lifecycle:
            if self._llm is not None:
                return
            building = asyncio.ensure_future(
                asyncio.to_thread(build, self._model, self._options, self._arguments())
            )
            try:
                running = await asyncio.shield(building)
            except asyncio.CancelledError:
                # The thread can't be interrupted; what it builds must not outlive this call.
                with contextlib.suppress(EngineError):
                    await _end(await building)
                raise
            try:
                await self._warm_up(running.llm)
            except BaseException:
                await self._fail_pending()
                await _end(running)
                raise
            self._process, self._llm = running, running.llm

    async def stop(self) -> None:
        """End the engine process; decodes under way get EngineDeadError. Idempotent."""
        async with self._lifecycle:
            llm, self._llm = self._llm, None
            process, self._process = self._process, None
            if llm is None or process is None:
                return
            await self._fail_pending()
            if self._probe is not None:
                self._probe.cancel()
            if llm.output_handler is not None:
                # Before the shutdown, or it would log the orderly end as a failure.
                llm.output_handler.cancel()
                await asyncio.wait([llm.output_handler], timeout=5.0)
            await _end(process, kill=self._stuck)

    async def check(self) -> None:
        """Ask the engine process for a sign of life.

        Raises:
            EngineDeadError: it is gone, or it neither answered nor computed for
                ``check_timeout_s``.
        """
        llm = self._running()
        if self._probe is None or self._probe.done():
            # One probe at a time: a stopped process must not pile them up.
            self._probe = asyncio.create_task(llm.is_paused())
            self._probe_began = time.monotonic()
            self._keep(self._probe)
        self._stuck = False
        deadline = time.monotonic() + self._options.check_timeout_s
        worked: float | None = None
        while not self._probe.done() and not llm.errored and time.monotonic() < deadline:
            # vLLM leaves a probe unanswered when its process dies, hence the short turns.
            await asyncio.wait([self._probe], timeout=_CHECK_TURN_S)
            if worked is None and not self._probe.done():
                worked = await asyncio.to_thread(self._processor_seconds)
        if llm.errored:
            raise EngineDeadError("the engine process is gone")
        if not self._probe.done():
            if worked is not None and await asyncio.to_thread(self._is_busy, worked):
                return
            self._stuck = True
            raise EngineDeadError(
                f"the engine process has not answered for {self._options.check_timeout_s:g} s"
            )
        if error := None if self._probe.cancelled() else self._probe.exception():
            raise EngineDeadError(f"the engine process does not answer: {error}")

    def _is_busy(self, before: float) -> bool:
        """True when the process, silent as it is, has computed since ``before``.

        It answers between two steps, and a step of many wide beams on a loaded machine may take
        longer than the check waits. A process that is stopped or gone computes nothing; one that
        computes for ever is found after ``busy_timeout_s``.
        """
        spent = self._processor_seconds() - before
        silent = time.monotonic() - self._probe_began
        share = _BUSY_SHARE * self._options.check_timeout_s
        return spent >= share and silent < self._options.busy_timeout_s

    def _processor_seconds(self) -> float:
        """Processor time of the engine process and its children so far; 0 when it is gone."""
        import psutil

        if self._process is None:
            return 0.0
        total = 0.0
        for one in self._process.llm.engine_core.resources.engine_manager.processes:
            with contextlib.suppress(psutil.Error):
                core = psutil.Process(one.pid)
                for process in (core, *core.children(recursive=True)):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def info(self) -> JsonDict:
        """Facts about the engine. Before `start` only the name and the version."""
        return {"engine": self.name, "vllm_version": installed_version(), **self._facts}

    def load(self) -> Load:
        """See `service.engine.base.Engine.load`. What waits inside vLLM counts as running."""
        return Load(self.in_flight(), 0)

    def in_flight(self) -> int:
        """vLLM requests submitted and not yet finished."""
        if self._llm is None or self._llm.errored:
            return 0
        return int(self._llm.output_processor.get_num_unfinished_requests())

    def _running(self) -> Any:
        if self._llm is None:
            raise EngineDeadError("the engine is not running")
        if self._llm.errored:
            raise EngineDeadError("the engine process is gone")
        return self._llm

    async def _warm_up(self, llm: Any) -> None:
        """Bind the engine to this loop with one request, and read what it settled on."""
        import torch

        config = llm.vllm_config
        self._max_model_len = int(config.model_config.max_model_len)
        self._vocab_size = int(config.model_config.get_vocab_size())
        vocabulary = self._model.vocabulary
        # Reserved rows too: later versions activate them.
        if vocabulary.first_token_id + vocabulary.rows > self._vocab_size:
            raise EngineError(
                f"the model in {self._model.model_dir} has {self._vocab_size} rows, the SID "
                f"vocabulary ends at {vocabulary.first_token_id + vocabulary.rows}"
            )
        await self._first_request(llm)
        self._facts = {
            "torch_version": torch.__version__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": config.device_config.device_type,
            "max_model_len": self._max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "kv_block_size": config.cache_config.block_size,
            "model_runner": "v2" if config.use_v2_model_runner else "v1",
        }

    def _check_prompt(self, request: DecodeRequest) -> None:
        """Raise for a prompt that vLLM would not take, or that would end its process."""
        levels = request.model.index.levels
        needed = len(request.prompt_token_ids) + levels
        if needed > self._max_model_len:
            raise PromptTooLongError(
                f"a prompt of {len(request.prompt_token_ids)} tokens and an item of {levels} "
                f"make {needed}; the model takes {self._max_model_len}"
            )
        if not request.prompt_token_ids:
            raise EngineError("the prompt is empty")
        # Without a tokenizer vLLM checks no token ids, and a foreign one kills its process.
        foreign = [i for i in request.prompt_token_ids if not 0 <= i < self._vocab_size]
        if foreign:
            raise EngineError(
                f"token ids {foreign[:5]} lie outside the model's vocabulary of {self._vocab_size}"
            )
        # A later version may write such a row; until then it must be in no cached prefix.
        active = request.model.vocabulary.active_mask
        places = [i - request.model.vocabulary.first_token_id for i in request.prompt_token_ids]
        if any(0 <= place < len(active) and not active[place] for place in places):
            raise EngineError("the prompt holds a SID token that is not active")

    async def _call(self, llm: Any, method: str, *args: Any) -> Any:
        """What a method of the worker returns. Raises EngineDeadError, EngineError if it fails."""
        answer = asyncio.ensure_future(llm.collective_rpc(method, args=args))
        self._keep(answer)
        try:
            while not answer.done():
                # vLLM leaves a call unanswered when its process dies, hence the short turns.
                await asyncio.wait([answer], timeout=_CHECK_TURN_S)
                if llm.errored and not answer.done():
                    raise EngineDeadError("the engine process is gone")
            if (error := answer.exception()) is None:
                (found,) = answer.result()
                return found
        finally:
            answer.cancel()
        if llm.errored:
            raise EngineDeadError("the engine process is gone") from error
        raise EngineError(f"{method} failed in the worker: {error}") from error

    async def _last(self, outputs: AsyncIterator[Any], request_id: str) -> Any:
        """The last output of a vLLM request. Raises EngineDeadError or EngineError."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine import exceptions

        last = None
        try:
            async for output in outputs:
                last = output
        except exceptions.EngineDeadError as error:
            raise EngineDeadError("the engine process is gone") from error
        except (exceptions.EngineGenerateError, VLLMClientError, ValueError) as error:
            cause = error.__cause__ or error
            raise EngineError(f"vLLM refused request {request_id}: {cause}") from error
        if last is None:
            raise EngineError(f"vLLM ended request {request_id} without an answer")
        return last

    async def _until_stopped(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of work that ends with EngineDeadError when the engine is stopped."""
        task = asyncio.create_task(work)
        self._pending.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if not cancelled_from_outside():
                raise EngineDeadError("the engine was stopped") from None
            raise
        finally:
            self._pending.discard(task)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run work beside the requests; it ends when the engine is stopped."""
        task = asyncio.create_task(work)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        self._keep(task)

    async def _fail_pending(self) -> None:
        """Let everything under way end with EngineDeadError."""
        pending = list(self._pending)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _keep(self, future: asyncio.Future[Any]) -> None:
        """Hold a reference to a task until it is done, and retrieve its exception."""
        self._background.add(future)

        def forget(done: asyncio.Future[Any]) -> None:
            self._background.discard(done)
            if not done.cancelled():
                done.exception()

        future.add_done_callback(forget)


def cancelled_from_outside() -> bool:
    """True when the current task itself was cancelled, not only a task that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _end(running: RunningVllm, *, kill: bool = False) -> None:
    """End an engine's processes and give back what it holds here."""
    await asyncio.to_thread(running.shut_down, kill=kill)
    # The shutdown asks the loop to close its sockets; this lets it.
    await asyncio.sleep(0)
    await asyncio.to_thread(running.release)
