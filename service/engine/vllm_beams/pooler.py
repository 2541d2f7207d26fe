"""The pooler that turns finished prompts into beam searches."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.pooler import Pooler
from vllm.v1.pool.metadata import PoolingMetadata

from service.engine.vllm_beams.clock import stamped
from service.engine.vllm_beams.decoder import BeamDecoder, Prompt
from service.engine.vllm_beams.snapshot import Snapshot
from service.engine.vllm_beams.wire import BEGAN, FAILED, BeamRequest

TASK = "plugin"
_BEGAN = "began"
"""Key that the worker adds to a request's parameters: when its first step began."""
logger = logging.getLogger(__name__)


class BeamPooler(Pooler):  # type: ignore[misc]
    """Answers each finished prompt with [k, 2]: catalogue row and score."""

    def __init__(self) -> None:
        super().__init__()
        self._step: Any = None
        self._step_began = 0.0
        self._decoder: BeamDecoder | None = None
        self._snapshots: dict[int, Snapshot] = {}
        self.searches = 0
        self.failures = 0

    def note_step(self, attention_metadata: Any) -> None:
        """Keep the attention metadata of the step whose hidden states come next."""
        self._step = attention_metadata
        self._step_began = time.monotonic()

    def attach(self, decoder: BeamDecoder) -> None:
        """Give the pooler its decoder, once the KV cache exists."""
        self._decoder = decoder

    def install(self, snapshot: Snapshot) -> None:
        """Serve a version from now on, beside those that are there."""
        self._snapshots[snapshot.version] = snapshot

    def discard(self, version: int) -> None:
        """Forget a version, if it is here."""
        self._snapshots.pop(version, None)

    def snapshot(self, version: int) -> Snapshot:
        """A version. Raises KeyError when it is not here."""
        return self._snapshots[version]

    @property
    def versions(self) -> list[int]:
        """Versions that can be asked for, ascending."""
        return sorted(self._snapshots)

    def get_supported_tasks(self) -> Set[Any]:
        """Only the task that vLLM leaves to plugins."""
        return {TASK}

    def forward(
        self, hidden_states: Tensor, pooling_metadata: PoolingMetadata
    ) -> list[Tensor | None]:
        """Run the searches of the prompts that ended in this step.

        Args:
            hidden_states: [tokens of the step, D].
            pooling_metadata: vLLM's, of the step's requests.

        Returns:
            Per request [k, 2] float64 with times behind (`clock.stamped`), or None while its prompt
            is unfinished. Never raises for a request's sake: an exception here would end vLLM's
            engine for all.
        """
        count = len(pooling_metadata.pooling_params)
        if self._step is None or self._decoder is None:
            # vLLM measures memory with a step of its own before there is a cache.
            return [torch.zeros(1, 2, dtype=torch.float64) for _ in range(count)]
        prefilled = time.monotonic()
        cursor = pooling_metadata.get_pooling_cursor()
        answers: list[Tensor | None] = [None] * count
        by_version: dict[int, list[tuple[int, Prompt]]] = {}
        last = hidden_states[cursor.last_token_indices_gpu]
        tables = next(iter(self._step.values())).block_table
        began = [self._step_began] * count
        for number, finished in enumerate(cursor.get_finished_mask()):
            params = pooling_metadata.pooling_params[number].extra_kwargs
            if params is not None:
                # The same mapping in every step of a request, so its first step is remembered.
                began[number] = params.setdefault(_BEGAN, self._step_began)
            if not finished:
                continue
            self.searches += 1
            try:
                request = BeamRequest.from_params(params or {})
            except (KeyError, TypeError, ValueError):
                answers[number] = self._failure("a request that can't be read")
                continue
            length = int(cursor.prompt_lens_cpu[number])
            prompt = Prompt(request, last[number], tables[number], length)
            by_version.setdefault(request.version, []).append((number, prompt))
        for version, entries in by_version.items():
            found = self._search(self._decoder, version, [prompt for _, prompt in entries])
            for (number, _), answer in zip(entries, found, strict=True):
                answers[number] = answer
        # All answers of a step leave together, whichever search was first.
        beams = time.monotonic() - prefilled
        return [
            answer
            if answer is None
            else stamped(answer, BEGAN, (began[number], prefilled - began[number], beams))
            for number, answer in enumerate(answers)
        ]

    def _search(self, decoder: BeamDecoder, version: int, prompts: list[Prompt]) -> list[Tensor]:
        try:
            return decoder.decode(prompts, self._snapshots[version])
        except Exception:
            if len(prompts) == 1:
                return [self._failure(f"a search over version {version}")]
        # One of them failed; alone, the others succeed.
        return [self._search(decoder, version, [prompt])[0] for prompt in prompts]

    def _failure(self, what: str) -> Tensor:
        """Log the exception at hand, count it, and say so to the service."""
        self.failures += 1
        logger.exception("%s failed", what)
        return torch.full((1, 2), FAILED, dtype=torch.float64)
