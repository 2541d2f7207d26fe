"""The pooler that turns finished prompts into beam searches."""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import Pooler
from vllm.v1.pool.metadata import PoolingMetadata

from service.engine.vllm_beams.decoder import BeamDecoder, Prompt
from service.engine.vllm_beams.snapshot import Snapshot
from service.engine.vllm_beams.wire import FAILED, BeamRequest

if TYPE_CHECKING:
    from torch import nn

TASK = "plugin"
logger = logging.getLogger(__name__)


class BeamPooler(Pooler):  # type: ignore[misc]
    """Answers each finished prompt with [k, 2]: catalogue row and score.

    Args:
        model: the beam model it belongs to.
        config: vLLM's configuration.
    """

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        super().__init__()
        # In a tuple: a module inside its own submodule would be walked without end.
        self._model: tuple[Any, ...] = (model,)
        self._config = config
        self._step: Any = None
        self._decoder: BeamDecoder | None = None
        self._snapshots: dict[int, Snapshot] = {}
        self.searches = 0
        self.failures = 0

    def note_step(self, attention_metadata: Any) -> None:
        """Keep the attention metadata of the step whose hidden states come next."""
        self._step = attention_metadata

    def attach(self, decoder: BeamDecoder) -> None:
        """Give the pooler its decoder, once the KV cache exists."""
        self._decoder = decoder

    def install(self, snapshot: Snapshot) -> None:
        """Serve a version from now on, beside those that are there."""
        self._snapshots[snapshot.version] = snapshot

    def discard(self, version: int) -> None:
        """Forget a version; requests for it fail from now on."""
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

        Never raises for one request's sake: an exception here would end vLLM's engine for all.
        """
        count = len(pooling_metadata.pooling_params)
        if self._step is None or self._decoder is None:
            # vLLM measures memory with a step of its own before there is a cache.
            return [torch.zeros(1, 2, dtype=torch.float64) for _ in range(count)]
        cursor = pooling_metadata.get_pooling_cursor()
        answers: list[Tensor | None] = [None] * count
        by_version: dict[int, list[tuple[int, Prompt]]] = {}
        last = hidden_states[cursor.last_token_indices_gpu]
        tables = next(iter(self._step.values())).block_table
        for number, finished in enumerate(cursor.get_finished_mask()):
            if not finished:
                continue
            params = pooling_metadata.pooling_params[number].extra_kwargs
            request = BeamRequest.from_params(params or {})
            length = int(cursor.prompt_lens_cpu[number])
            prompt = Prompt(request, last[number], tables[number], length)
            by_version.setdefault(request.version, []).append((number, prompt))
        for version, entries in by_version.items():
            found = self._search(version, [prompt for _, prompt in entries])
            for (number, _), answer in zip(entries, found, strict=True):
                answers[number] = answer
        return answers

    def _search(self, version: int, prompts: list[Prompt]) -> list[Tensor]:
        self.searches += len(prompts)
        try:
            if self._decoder is None:
                raise RuntimeError("there is no decoder")
            with self._model[0].clock.searches:
                return self._decoder.decode(prompts, self._snapshots[version])
        except Exception:
            self.failures += len(prompts)
            logger.exception("searches over version %d failed", version)
            failed = torch.full((1, 2), FAILED, dtype=torch.float64)
            return [failed for _ in prompts]
