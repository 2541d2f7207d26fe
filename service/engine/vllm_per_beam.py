"""vLLM with a request per beam: every beam of every level is one request of its public AsyncLLM.

`BeamSearch` drives. Per level each prefix of the frontier becomes a request for one token, whose
prompt is the user's prompt plus the prefix; ``allowed_token_ids`` narrows vLLM's softmax to the
active SID rows, ``logprob_token_ids`` names the children whose log-probabilities come back. The
prefix cache serves what the requests share. docs/decisions/0003-vllm-per-beam.md says why, and
what it costs; `service.engine.vllm_engine` decodes inside the worker instead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gti_core.bundle.delta import Rows
from gti_core.decoding import BeamSearch, ScoredRow
from gti_core.types import FloatArray
from service.engine.base import (
    CatalogChange,
    DecodeRequest,
    EngineDeadError,
    EngineError,
    ServingModel,
    check_same_weights,
)
from service.engine.timings import LevelTimer
from service.engine.vllm_base import VllmProcess, cancelled_from_outside

LOGPROBS_PER_REQUEST = 128
"""Most `logprob_token_ids` of a request in vLLM; a prefix with more children takes several."""


@dataclass(frozen=True)
class _Query:
    """One vLLM request: children of one prefix. ``beam`` is its place in the frontier, ``active``
    the token ids of the version's active rows."""

    request_id: str
    beam: int
    prompt_token_ids: list[int]
    children: list[int]
    active: list[int]


class VllmPerBeamEngine(VllmProcess):
    """Decodes with vLLM's public requests alone. See `service.engine.base.Engine`."""

    @property
    def name(self) -> str:
        """``vllm-per-beam``."""
        return "vllm-per-beam"

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """Best items first. See `service.engine.base.Engine.decode`."""
        llm = self._running()
        request.timings.restart()
        self._check_prompt(request)
        model = request.model
        search = BeamSearch(model.index, model.vocabulary, request.filter(), request.beam_width)
        # vLLM queues every beam of every level, and tells nothing of it.
        timer = LevelTimer(request.timings, queued=False)
        while not search.done:
            logprobs = await self._score(llm, request, search)
            timer.scored()
            search.advance(logprobs)
            timer.chosen()
        return search.results(request.k)

    async def publish(
        self,
        model: ServingModel,
        *,
        rows: Rows | None = None,
        change: CatalogChange | None = None,
    ) -> None:
        """See `service.engine.base.Engine.publish`. Only changes of the catalogue are possible.

        On a CPU vLLM's own head, which this engine's scores come from, is a packed copy that no
        public means renews.
        """
        self._running()
        if rows is not None:
            raise EngineError("new rows need the engine vllm")
        check_same_weights(self._model, model)
        self._model = model

    async def _first_request(self, llm: Any) -> None:
        active = self._model.active_token_ids
        await self._ask(llm, _Query("warm-up", 0, active[:1], active[:1], active))

    async def _score(self, llm: Any, request: DecodeRequest, search: BeamSearch) -> FloatArray:
        """Log-probabilities [len(frontier), S] of one level; NaN where nothing was asked."""
        vocabulary = request.model.vocabulary
        queries = list(self._queries(request, search))
        answers = await self._ask_all(llm, queries)
        logprobs = np.full((len(search.frontier), vocabulary.rows), np.nan, dtype=np.float32)
        for query, answer in zip(queries, answers, strict=True):
            for token_id in query.children:
                value = answer.get(token_id, -math.inf)
                if not math.isfinite(value):
                    raise EngineError(
                        f"vLLM gave no log-probability for the allowed token {token_id} "
                        f"(request {request.request_id}, level {search.level})"
                    )
                logprobs[query.beam, token_id - vocabulary.first_token_id] = value
        return logprobs

    def _queries(self, request: DecodeRequest, search: BeamSearch) -> Iterator[_Query]:
        vocabulary = request.model.vocabulary
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
                    request.model.active_token_ids,
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
            if isinstance(error, asyncio.CancelledError) and not cancelled_from_outside():
                raise EngineDeadError("the engine was stopped") from None
            raise
        finally:
            self._pending.difference_update(tasks)

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
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            allowed_token_ids=query.active,
            logprob_token_ids=query.children,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        last = await self._last(
            llm.generate(tokens_input(query.prompt_token_ids), params, query.request_id),
            query.request_id,
        )
        if not last.outputs or not last.outputs[0].logprobs:
            raise EngineError(f"vLLM ended request {query.request_id} without an answer")
        flat = last.outputs[0].logprobs
        return dict(zip(flat.token_ids, flat.logprobs, strict=True))
