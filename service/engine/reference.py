"""ReferenceEngine: the plain transformers engine, the oracle for the fast ones.

One request at a time, float32 on the CPU, in one worker thread. The prompt is computed once per
request; at each level every prefix of the frontier is run whole behind a copy of the prompt's
cache, so no cache is ever reordered to follow its beam.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

from gti_core.bundle.delta import Rows
from gti_core.decoding import BeamSearch, ScoredRow
from gti_core.errors import GtiError
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
from service.engine.live_rows import LiveRows
from service.engine.timings import LevelTimer, Load

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

ROWS_PER_PASS = 32
"""Prefixes run in one forward pass; bounds the memory that the cache's copies take."""


class Scorer:
    """Log-probabilities of SID tokens from a causal LM.

    Args:
        model: a causal LM of transformers in evaluation mode.
        vocabulary: the SID vocabulary; its token ids are rows of the model.
    """

    def __init__(self, model: Any, vocabulary: SidVocabulary) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._inactive = torch.from_numpy(~vocabulary.active_mask)

    @torch.inference_mode()
    def prefill(self, prompt_token_ids: Sequence[int]) -> tuple[FloatArray, Any]:
        """Run a prompt.

        Args:
            prompt_token_ids: T tokens, at least one.

        Returns:
            Log-probabilities of the first code's token, shape [1, S], float32, nats; and the
            prompt's key-value cache.
        """
        ids = torch.tensor([list(prompt_token_ids)])
        output = self._model(ids, use_cache=True, logits_to_keep=1)
        return self._logprobs(output.logits[:, -1]), output.past_key_values

    @torch.inference_mode()
    def extend(self, cache: Any, prefixes: Sequence[Sid]) -> FloatArray:
        """Run prefixes of one length, at least 1, behind a prompt.

        Args:
            cache: the prompt's key-value cache; left as it is.
            prefixes: R prefixes.

        Returns:
            Log-probabilities of the next code's token, shape [R, S], float32, nats.
        """
        parts = []
        for start in range(0, len(prefixes), ROWS_PER_PASS):
            chunk = prefixes[start : start + ROWS_PER_PASS]
            ids = torch.tensor([self._vocabulary.token_ids(prefix) for prefix in chunk])
            copied = copy.deepcopy(cache)
            copied.batch_repeat_interleave(len(chunk))
            output = self._model(ids, past_key_values=copied, use_cache=True, logits_to_keep=1)
            parts.append(self._logprobs(output.logits[:, -1]))
        return np.concatenate(parts)

    def _logprobs(self, logits: torch.Tensor) -> FloatArray:
        first = self._vocabulary.first_token_id
        rows = logits[:, first : first + self._vocabulary.rows].float()
        rows = rows.masked_fill(self._inactive, -torch.inf)
        return np.asarray(torch.log_softmax(rows, dim=-1).numpy(), dtype=np.float32)


class _CancelledError(Exception):
    """The request's caller is gone."""


class ReferenceEngine:
    """The oracle. See `service.engine.base.Engine`.

    Args:
        model: what to serve.
    """

    def __init__(self, model: ServingModel) -> None:
        self._model = model
        self._lm: Any = None
        self._rows: LiveRows | None = None
        self._publishing = asyncio.Lock()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")
        self._stopped = threading.Event()
        self._under_way = 0

    @property
    def name(self) -> str:
        """Always ``reference``."""
        return "reference"

    @property
    def model(self) -> ServingModel:
        """The current version."""
        return self._model

    async def start(self) -> None:
        """Load the model. Raises EngineError when it can't be loaded or does not fit."""
        loop = asyncio.get_running_loop()
        self._lm = await loop.run_in_executor(self._executor, self._load)

    async def stop(self) -> None:
        """Give up running work at the next level, and free the model. Idempotent."""
        self._stopped.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._lm = self._rows = None

    async def publish(
        self,
        model: ServingModel,
        *,
        rows: Rows | None = None,
        change: CatalogChange | None = None,
    ) -> None:
        """See `Engine.publish`. Rows are written between two requests; ``change`` is not read."""
        async with self._publishing:
            await self.check()
            check_same_weights(self._model, model)
            await self._in_thread(lambda: self._write(model, rows))
            self._model = model

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """See `Engine.decode`. Cancelling takes effect at the next level."""
        lm, model = self._lm, request.model
        request.timings.restart()
        if lm is None:
            raise EngineDeadError("the reference engine is not running")
        levels = model.vocabulary.levels
        if len(request.prompt_token_ids) + levels > model.max_tokens:
            raise PromptTooLongError(
                f"{len(request.prompt_token_ids)} prompt tokens and {levels} levels exceed "
                f"{model.max_tokens} tokens"
            )
        cancelled = threading.Event()
        scorer = Scorer(lm, model.vocabulary)
        self._under_way += 1
        try:
            return await self._in_thread(lambda: self._decode(scorer, request, cancelled))
        finally:
            self._under_way -= 1
            cancelled.set()

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        """Run work in the model's thread. Raises EngineDeadError or EngineError."""
        if self._stopped.is_set():
            raise EngineDeadError("the reference engine is not running")
        future = self._executor.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # Cancelled by whom: stop() drops queued work, which is no wish of the caller.
            task = asyncio.current_task()
            if self._stopped.is_set() and task is not None and not task.cancelling():
                raise EngineDeadError("the reference engine was stopped") from None
            raise
        except _CancelledError:
            raise EngineDeadError("the reference engine was stopped") from None
        except (GtiError, RuntimeError, ValueError) as error:
            logger.exception("the model's thread failed")
            raise EngineError(f"the reference engine failed: {error}") from error

    async def check(self) -> None:
        """Raise EngineDeadError unless the model is loaded."""
        if self._lm is None:
            raise EngineDeadError("the reference engine is not running")

    def load(self) -> Load:
        """One request runs at a time."""
        running = min(1, self._under_way)
        return Load(running, self._under_way - running)

    def info(self) -> JsonDict:
        """Facts for /v1/info."""
        return {
            "library": f"transformers {transformers.__version__}",
            "dtype": "float32",
            "device": "cpu",
            "max_tokens": self._model.max_tokens,
        }

    def _load(self) -> Any:
        folder = self._model.model_dir
        lm = load_causal_lm(folder)
        vocabulary = self._model.vocabulary
        rows = int(lm.get_output_embeddings().weight.shape[0])
        if rows < vocabulary.first_token_id + vocabulary.rows:
            raise EngineError(
                f"{folder}: the model has {rows} tokens, the SID vocabulary ends at "
                f"{vocabulary.first_token_id + vocabulary.rows}"
            )
        longest = getattr(lm.config, "max_position_embeddings", None)
        if longest is not None and longest < self._model.max_tokens:
            raise EngineError(
                f"{folder}: the model takes {longest} tokens, the prompt template needs "
                f"{self._model.max_tokens}"
            )
        matrices = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
        self._rows = LiveRows(*matrices, vocabulary)
        self._rows.reach(vocabulary)
        return lm

    def _write(self, model: ServingModel, rows: Rows | None) -> None:
        live = self._rows
        if live is None or self._stopped.is_set():
            raise _CancelledError
        if rows is not None:
            live.write(rows)
        live.reach(model.vocabulary)

    def _decode(
        self, scorer: Scorer, request: DecodeRequest, cancelled: threading.Event
    ) -> list[ScoredRow]:
        model = request.model
        search = BeamSearch(model.index, model.vocabulary, request.filter(), request.beam_width)
        cache: Any = None
        request.timings.prompt_tokens = len(request.prompt_token_ids)
        request.timings.cached_tokens = 0
        timer = LevelTimer(request.timings)
        while not search.done:
            if cancelled.is_set() or self._stopped.is_set():
                raise _CancelledError
            if search.level == 0:
                logprobs, cache = scorer.prefill(request.prompt_token_ids)
            else:
                logprobs = scorer.extend(cache, [beam.prefix for beam in search.frontier])
            timer.scored()
            search.advance(logprobs)
            timer.chosen()
        return search.results(request.k)


def load_causal_lm(folder: Path) -> Any:
    """A causal LM from a local Hugging Face folder: float32, CPU, evaluation mode.

    Raises:
        EngineError: the folder holds no model that transformers can load.
    """
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"{folder}: not a model that can be loaded: {error}") from error
    return model.eval()
