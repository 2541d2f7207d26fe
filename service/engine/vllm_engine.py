"""The vLLM engine: every beam of every level is one request of vLLM's public AsyncLLM.

`BeamSearch` drives. Per level each prefix of the frontier becomes a request for one token, whose
prompt is the user's prompt plus the prefix; ``allowed_token_ids`` narrows vLLM's softmax to the
active SID rows, ``logprob_token_ids`` names the children whose log-probabilities come back. The
prefix cache serves what the requests share. docs/decisions/0003-vllm-per-beam.md says why, and
what it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gti_core.decoding import BeamSearch, ScoredRow
from gti_core.types import FloatArray, JsonDict
from service.engine.base import (
    DecodeRequest,
    EngineDeadError,
    EngineError,
    PromptTooLongError,
    ServingModel,
)
from service.engine.vllm_start import (
    TESTED_VERSIONS,
    RunningVllm,
    VllmOptions,
    build,
    installed_version,
)

__all__ = ["TESTED_VERSIONS", "VllmEngine", "VllmOptions"]

LOGPROBS_PER_REQUEST = 128
"""Most `logprob_token_ids` of a request in vLLM; a prefix with more children takes several."""

_CHECK_TURN_S = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Query:
    """One vLLM request: children of one prefix. ``beam`` is its place in the frontier."""

    request_id: str
    beam: int
    prompt_token_ids: list[int]
    children: list[int]


class VllmEngine:
    """Decodes with vLLM in a process of its own. See `service.engine.base.Engine`.

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
        self._serial = itertools.count()
        self._active_token_ids = [
            int(row) + model.vocabulary.first_token_id
            for row in np.flatnonzero(model.vocabulary.active_mask)
        ]
        self._lifecycle = asyncio.Lock()
        self._probe: asyncio.Task[bool] | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._pending: set[asyncio.Task[Mapping[int, float]]] = set()

    @property
    def name(self) -> str:
        """``vllm``."""
        return "vllm"

    @property
    def model(self) -> ServingModel:
        """The version being served."""
        return self._model

    async def start(self) -> None:
        """Load the model in a new process; the event loop stays free. A second call does nothing.

        Raises:
            EngineError: vLLM is missing, of an untested version, or can't load the model.
        """
        async with self._lifecycle:
            if self._llm is not None:
                return
            building = asyncio.ensure_future(asyncio.to_thread(build, self._model, self._options))
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
            await _end(process)

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """Best items first. See `service.engine.base.Engine.decode`."""
        llm = self._running()
        levels = self._model.index.levels
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
        search = BeamSearch(
            self._model.index,
            self._model.vocabulary,
            self._model.index.admissible(request.excluded_rows),
            request.beam_width,
        )
        while not search.done:
            search.advance(await self._score(llm, request, search))
        return search.results(request.k)

    async def check(self) -> None:
        """Ask the engine process for a sign of life.

        Raises:
            EngineDeadError: it is gone, or did not answer within ``check_timeout_s``.
        """
        llm = self._running()
        if self._probe is None or self._probe.done():
            # One probe at a time: a stopped process must not pile them up.
            self._probe = asyncio.create_task(llm.is_paused())
            self._keep(self._probe)
        deadline = time.monotonic() + self._options.check_timeout_s
        while not self._probe.done() and not llm.errored and time.monotonic() < deadline:
            # vLLM leaves a probe unanswered when its process dies, hence the short turns.
            await asyncio.wait([self._probe], timeout=_CHECK_TURN_S)
        if llm.errored:
            raise EngineDeadError("the engine process is gone")
        if not self._probe.done():
            raise EngineDeadError(
                f"the engine process has not answered for {self._options.check_timeout_s:g} s"
            )
        if error := None if self._probe.cancelled() else self._probe.exception():
            raise EngineDeadError(f"the engine process does not answer: {error}")

    def info(self) -> JsonDict:
        """Facts about the engine. Before `start` only the name and the version."""
        return {"engine": self.name, "vllm_version": installed_version(), **self._facts}

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
        if self._active_token_ids[-1] >= self._vocab_size:
            raise EngineError(
                f"the model in {self._model.model_dir} has {self._vocab_size} rows, the SID "
                f"vocabulary needs token id {self._active_token_ids[-1]}"
            )
        query = _Query("warm-up", 0, [self._active_token_ids[0]], self._active_token_ids[:1])
        await self._ask(llm, query)
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

    async def _score(self, llm: Any, request: DecodeRequest, search: BeamSearch) -> FloatArray:
        """Log-probabilities [len(frontier), S] of one level; NaN where nothing was asked."""
        first = self._model.vocabulary.first_token_id
        queries = list(self._queries(request, search))
        answers = await self._ask_all(llm, queries)
        logprobs = np.full(
            (len(search.frontier), self._model.vocabulary.rows), np.nan, dtype=np.float32
        )
        for query, answer in zip(queries, answers, strict=True):
            for token_id in query.children:
                value = answer.get(token_id, -math.inf)
                if not math.isfinite(value):
                    raise EngineError(
                        f"vLLM gave no log-probability for the allowed token {token_id} "
                        f"(request {request.request_id}, level {search.level})"
                    )
                logprobs[query.beam, token_id - first] = value
        return logprobs

    def _queries(self, request: DecodeRequest, search: BeamSearch) -> Iterator[_Query]:
        vocabulary = self._model.vocabulary
        serial = next(self._serial)
        for number, beam in enumerate(search.frontier):
            prompt = [*request.prompt_token_ids, *vocabulary.token_ids(beam.prefix)]
            children = [
                vocabulary.token_id(search.level, code) for code in search.allowed_codes(beam)
            ]
            for start in range(0, len(children), LOGPROBS_PER_REQUEST):
                yield _Query(
                    f"{request.request_id}-{serial}-{number}-{start}",
                    number,
                    prompt,
                    children[start : start + LOGPROBS_PER_REQUEST],
                )

    async def _ask_all(self, llm: Any, queries: Sequence[_Query]) -> list[Mapping[int, float]]:
        """Answers in the order of the queries. Leaves nothing running, however it ends."""
        tasks = [asyncio.create_task(self._ask(llm, query)) for query in queries]
        self._pending.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            withdrawal = asyncio.create_task(self._withdraw(llm, queries, tasks))
            self._keep(withdrawal)
            await asyncio.shield(withdrawal)
            if isinstance(error, asyncio.CancelledError) and not _cancelled_from_outside():
                raise EngineDeadError("the engine was stopped") from None
            raise
        finally:
            self._pending.difference_update(tasks)

    async def _fail_pending(self) -> None:
        """Let every decode under way end with EngineDeadError."""
        pending = list(self._pending)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _withdraw(
        self, llm: Any, queries: Sequence[_Query], tasks: Sequence[asyncio.Task[Any]]
    ) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not llm.errored:
            # `generate` aborts its own request, except when cancelled while still submitting it.
            await llm.abort([query.request_id for query in queries])

    async def _ask(self, llm: Any, query: _Query) -> Mapping[int, float]:
        """Log-probabilities by token id, natural logarithm, normalized over the active rows."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import exceptions

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            allowed_token_ids=self._active_token_ids,
            logprob_token_ids=query.children,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        last = None
        try:
            async for output in llm.generate(
                tokens_input(query.prompt_token_ids), params, query.request_id
            ):
                last = output
        except exceptions.EngineDeadError as error:
            raise EngineDeadError("the engine process is gone") from error
        except (exceptions.EngineGenerateError, VLLMClientError, ValueError) as error:
            cause = error.__cause__ or error
            raise EngineError(f"vLLM refused request {query.request_id}: {cause}") from error
        if last is None or not last.outputs or not last.outputs[0].logprobs:
            raise EngineError(f"vLLM ended request {query.request_id} without an answer")
        flat = last.outputs[0].logprobs
        return dict(zip(flat.token_ids, flat.logprobs, strict=True))

    def _keep(self, future: asyncio.Future[Any]) -> None:
        """Hold a reference to a task until it is done, and retrieve its exception."""
        self._background.add(future)

        def forget(done: asyncio.Future[Any]) -> None:
            self._background.discard(done)
            if not done.cancelled():
                done.exception()

        future.add_done_callback(forget)


def _cancelled_from_outside() -> bool:
    """True when the current task itself was cancelled, not only a task that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _end(running: RunningVllm) -> None:
    """End an engine's processes and give back what it holds here."""
    await asyncio.to_thread(running.shut_down)
    # The shutdown asks the loop to close its sockets; this lets it.
    await asyncio.sleep(0)
    await asyncio.to_thread(running.release)
