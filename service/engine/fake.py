"""FakeEngine: no model, no weights, made-up but fixed scores.

For tests of everything around an engine, and for trying the API in a second. It runs the same
constrained beam search as the real engines; only the log-probabilities come from a hash.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gti_core.bundle.delta import Rows
from gti_core.decoding import BeamSearch, ScoredRow
from gti_core.types import FloatArray, JsonDict, Sid
from gti_core.vocabulary import SidVocabulary
from service.engine.base import (
    CatalogChange,
    DecodeRequest,
    EngineDeadError,
    EngineError,
    PromptTooLongError,
    ServingModel,
    check_same_weights,
)
from service.engine.timings import LevelTimer, Load


def fake_logprobs(
    prompt_token_ids: Sequence[int], prefixes: Sequence[Sid], vocabulary: SidVocabulary
) -> FloatArray:
    """Made-up log-probabilities of the next SID token.

    A logit in [-4, 4) is drawn from a hash of (prompt, prefix, row); then log-softmax over the
    active rows. The same on every machine.

    Args:
        prompt_token_ids: the prompt.
        prefixes: SID prefixes, one a row of the result.
        vocabulary: the SID vocabulary, S rows.

    Returns:
        Shape [len(prefixes), S], float32, nats; -inf outside the active rows.
    """
    prompt = hashlib.blake2b(np.asarray(prompt_token_ids, dtype="<i8").tobytes(), digest_size=8)
    seeds = np.empty(len(prefixes), dtype=np.uint64)
    for number, prefix in enumerate(prefixes):
        digest = prompt.copy()
        digest.update(np.asarray(prefix, dtype="<i4").tobytes())
        seeds[number] = int.from_bytes(digest.digest(), "little")
    bits = _mix(seeds[:, None] + np.arange(vocabulary.rows, dtype=np.uint64)[None, :])
    logits = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**21) - np.float32(4)
    logits[:, ~vocabulary.active_mask] = -np.inf
    top = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    logprobs: FloatArray = (logits - top - total).astype(np.float32)
    return logprobs


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finalizer of splitmix64 (Steele, Lea, Flood 2014); wraps modulo 2**64 on purpose.
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class FakeEngine:
    """An engine without a model. See `service.engine.base.Engine`.

    Args:
        model: what to serve; ``model.model_dir`` is not read.
        delay_s: seconds each level takes.
        start_delay_s: seconds that starting takes.
        start_error: message of an EngineError to raise on start.
        publish_error: message of an EngineError to raise on publishing; may be set later.
    """

    def __init__(
        self,
        model: ServingModel,
        *,
        delay_s: float = 0.0,
        start_delay_s: float = 0.0,
        start_error: str | None = None,
        publish_error: str | None = None,
    ) -> None:
        self._model = model
        self._delay_s = delay_s
        self._start_delay_s = start_delay_s
        self._start_error = start_error
        self.publish_error = publish_error
        self._alive = False
        self.running = 0
        """Requests being decoded now."""
        self.finished = 0
        """Requests decoded to the end."""

    @property
    def name(self) -> str:
        """Always ``fake``."""
        return "fake"

    @property
    def model(self) -> ServingModel:
        """The current version."""
        return self._model

    async def start(self) -> None:
        """Wait as told, then be alive. Raises EngineError when made to."""
        await asyncio.sleep(self._start_delay_s)
        if self._start_error is not None:
            raise EngineError(self._start_error)
        self._alive = True

    async def stop(self) -> None:
        """End. Idempotent."""
        self._alive = False

    def kill(self) -> None:
        """Die as an engine process would: every request and check fails from now on."""
        self._alive = False

    async def publish(
        self,
        model: ServingModel,
        *,
        rows: Rows | None = None,
        change: CatalogChange | None = None,
    ) -> None:
        """See `Engine.publish`. There are no weights: ``rows`` and ``change`` are not read."""
        await self.check()
        if self.publish_error is not None:
            raise EngineError(self.publish_error)
        check_same_weights(self._model, model)
        self._model = model

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """See `Engine.decode`. Yields to the event loop between levels."""
        model, vocabulary = request.model, request.model.vocabulary
        request.timings.restart()
        if len(request.prompt_token_ids) + vocabulary.levels > model.max_tokens:
            raise PromptTooLongError(
                f"{len(request.prompt_token_ids)} prompt tokens and {vocabulary.levels} levels "
                f"exceed {model.max_tokens} tokens"
            )
        search = BeamSearch(model.index, vocabulary, request.filter(), request.beam_width)
        self.running += 1
        request.timings.prompt_tokens = len(request.prompt_token_ids)
        request.timings.cached_tokens = 0
        timer = LevelTimer(request.timings)
        try:
            while not search.done:
                await asyncio.sleep(self._delay_s)
                await self.check()
                prefixes = [beam.prefix for beam in search.frontier]
                logprobs = fake_logprobs(request.prompt_token_ids, prefixes, vocabulary)
                timer.scored()
                search.advance(logprobs)
                timer.chosen()
            self.finished += 1
            return search.results(request.k)
        finally:
            self.running -= 1

    async def check(self) -> None:
        """Raise EngineDeadError unless started and alive."""
        if not self._alive:
            raise EngineDeadError("the fake engine is not running")

    def load(self) -> Load:
        """Nothing ever waits."""
        return Load(self.running, 0)

    def info(self) -> JsonDict:
        """Facts for /v1/info."""
        return {
            "library": None,
            "dtype": "float32",
            "device": "cpu",
            "max_tokens": self._model.max_tokens,
        }
