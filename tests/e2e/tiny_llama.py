"""A tiny random Llama with SID rows on disk, a catalogue for it, and a float32 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex, ScoredRow, beam_search
from gti_core.types import FloatArray, Sid
from gti_core.vocabulary import SidVocabulary
from service.engine.base import DecodeRequest, ServingModel

BASE_TOKENS = 96
MAX_TOKENS = 96
MAX_POSITIONS = 128


def tiny_serving_model(
    folder: Path,
    *,
    tied: bool,
    sizes: tuple[int, ...] = (150, 24, 8),
    active: tuple[int, ...] = (140, 20, 6),
    items: int = 400,
    seed: int = 0,
) -> ServingModel:
    """Write a random Llama of 96 + S rows to ``folder`` and make a catalogue of random SIDs.

    The first level has more children than vLLM returns in one request (128). The weights are
    large enough for log-probabilities that differ by several nats, so that a wrong row shows.
    """
    vocabulary = SidVocabulary(sizes, active, BASE_TOKENS)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=BASE_TOKENS + vocabulary.rows,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    rng = np.random.default_rng(seed)
    every = np.stack(np.unravel_index(np.arange(int(np.prod(active))), active), axis=1)
    chosen = every[rng.choice(len(every), size=items, replace=False)]
    catalog = ItemCatalog(
        [Item(f"item-{row}", tuple(int(c) for c in sid)) for row, sid in enumerate(chosen)]
    )
    return ServingModel(folder, vocabulary, catalog, ConstraintIndex(catalog.sids), MAX_TOKENS)


class Oracle:
    """The same model in transformers: scores prefixes without a cache, in float32."""

    def __init__(self, model: ServingModel, dtype: torch.dtype = torch.float32) -> None:
        self._model = model
        self._lm = AutoModelForCausalLM.from_pretrained(model.model_dir, dtype=dtype).eval()
        self._active = torch.from_numpy(model.vocabulary.active_mask.copy())

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], prefixes: Sequence[Sid]) -> FloatArray:
        """Log-softmax over the active rows, shape [len(prefixes), S]; -inf elsewhere."""
        vocabulary = self._model.vocabulary
        ids = torch.tensor([[*prompt, *vocabulary.token_ids(prefix)] for prefix in prefixes])
        first = vocabulary.first_token_id
        logits = self._lm(ids).logits[:, -1, first : first + vocabulary.rows].float()
        logits[:, ~self._active] = -torch.inf
        scores: FloatArray = torch.log_softmax(logits, dim=-1).numpy()
        return scores

    def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """What an engine must answer."""
        return beam_search(
            lambda prefixes: self.score(request.prompt_token_ids, prefixes),
            self._model.index,
            self._model.vocabulary,
            request.filter(self._model.index),
            request.beam_width,
            request.k,
        )
