"""From a vLLM decoder class to one whose finished prompts become beam searches."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from service.engine.vllm_beams.clock import Clock
from service.engine.vllm_beams.pooler import BeamPooler
from service.engine.vllm_beams.snapshot import Snapshot


def beam_class(base: type[nn.Module], name: str) -> type[nn.Module]:
    """A subclass of a vLLM ``...ForCausalLM`` class for ``runner="pooling"``.

    Its forward pass is the base's. It keeps the attention metadata of the step for the pooler,
    which then continues the finished prompts (`service.engine.vllm_beams.decoder`).
    """

    class BeamModel(base):  # type: ignore[misc, valid-type]
        is_pooling_model: ClassVar[bool] = True
        default_seq_pooling_type: ClassVar[str] = "LAST"
        default_tok_pooling_type: ClassVar[str] = "ALL"
        attn_type: ClassVar[str] = "decoder"
        score_type: ClassVar[str] = "bi-encoder"

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.pooler = BeamPooler()
            self.clock = Clock()
            self._output: tuple[Tensor, ...] = ()

        def forward(self, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            self.pooler.note_step(get_forward_context().attn_metadata)
            with self.clock.prompts:
                return super().forward(input_ids, positions, *args, **kwargs)

        def beam_hidden(self, input_ids: Tensor, positions: Tensor) -> Tensor:
            """Last hidden states [R, D] of beam tokens."""
            with self.clock.beams:
                hidden: Tensor = super().forward(input_ids, positions)
            return hidden

        def sid_logprobs(self, hidden: Tensor, snapshot: Snapshot) -> Tensor:
            """Log-softmax over the active SID rows, [R, S] float32; -inf for the others."""
            vocabulary = snapshot.vocabulary
            first = vocabulary.first_token_id
            if not self._output:
                self._output = (output_matrix(self),)
            rows = self._output[0][first : first + vocabulary.rows]
            logits = (hidden @ rows.T).float()
            logits.masked_fill_(snapshot.inactive, float("-inf"))
            logprobs: Tensor = torch.log_softmax(logits, dim=-1)
            return logprobs

    BeamModel.__name__ = BeamModel.__qualname__ = name
    return BeamModel


def input_matrix(model: nn.Module) -> Tensor:
    """The live input embedding [V', D]."""
    (embedding,) = (
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    )
    matrix: Tensor = embedding.weight.data
    return matrix


def output_matrix(model: nn.Module) -> Tensor:
    """The live output matrix [V', D]: the head's weights, which a tied model shares with its input.

    Not the copy that vLLM packs for CPUs, which would miss rows written later.
    """
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    matrix: Tensor = heads[0].weight.data if heads else input_matrix(model)
    return matrix
