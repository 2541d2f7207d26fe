"""A tiny random Llama with SID rows on disk, a catalogue for it, and a float32 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gti_core.bundle.delta import Rows
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex, ScoredRow, beam_search
from gti_core.types import FloatArray, Sid
from gti_core.vocabulary import SidVocabulary
from service.engine.base import CatalogChange, DecodeRequest, ServingModel

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


def next_version(
    model: ServingModel,
    sids: Sequence[Sid],
    *,
    vocabulary: SidVocabulary | None = None,
    retired: Sequence[int] = (),
    restored: Sequence[int] = (),
    version: int = 0,
) -> tuple[ServingModel, CatalogChange]:
    """The version after ``model``, with items at further SIDs, and what changes."""
    change = CatalogChange(
        model.version,
        np.array(sids, dtype=np.int32).reshape(-1, model.index.levels),
        np.ones(len(sids), dtype=np.bool_),
        tuple(retired),
        tuple(restored),
    )
    items = [Item(f"item-{row}", sid) for row, sid in enumerate(sids, start=len(model.catalog))]
    catalog = ItemCatalog([*model.catalog.items, *items])
    available = np.concatenate([model.index.available, change.added_available])
    available[list(retired)] = False
    available[list(restored)] = True
    following = replace(
        model,
        catalog=catalog,
        # Built anew: the worker's, made from its parent's, must agree.
        index=ConstraintIndex(catalog.sids, available),
        vocabulary=vocabulary or model.vocabulary,
        version=version or model.version + 1,
    )
    return following, change


def random_rows(model: ServingModel, numbers: Sequence[int], *, tied: bool, seed: int) -> Rows:
    """Values for SID rows, spread as the tiny model's own."""
    width = 64
    rng = np.random.default_rng(seed)
    blocks = 0.2 * rng.standard_normal((2, len(numbers), width)).astype(np.float32)
    return Rows(np.array(numbers), blocks[0], None if tied else blocks[1])


def saved_with_rows(model: ServingModel, rows: Rows, folder: Path) -> ServingModel:
    """The version over a copy of its weights that has the rows from the start."""
    lm = AutoModelForCausalLM.from_pretrained(model.model_dir, dtype=torch.float32)
    ids = torch.from_numpy(rows.numbers) + model.vocabulary.first_token_id
    with torch.no_grad():
        lm.get_input_embeddings().weight[ids] = torch.from_numpy(rows.rows_in)
        if rows.rows_out is not None:
            lm.get_output_embeddings().weight[ids] = torch.from_numpy(rows.rows_out)
    lm.save_pretrained(folder)
    return replace(model, model_dir=folder)


class Oracle:
    """The same model in transformers: scores prefixes without a cache, in float32."""

    def __init__(self, model: ServingModel, dtype: torch.dtype = torch.float32) -> None:
        self._vocabulary = model.vocabulary
        self._lm = AutoModelForCausalLM.from_pretrained(model.model_dir, dtype=dtype).eval()

    @torch.inference_mode()
    def score(
        self,
        prompt: Sequence[int],
        prefixes: Sequence[Sid],
        vocabulary: SidVocabulary | None = None,
    ) -> FloatArray:
        """Log-softmax over the active rows, shape [len(prefixes), S]; -inf elsewhere."""
        vocabulary = vocabulary or self._vocabulary
        ids = torch.tensor([[*prompt, *vocabulary.token_ids(prefix)] for prefix in prefixes])
        first = vocabulary.first_token_id
        logits = self._lm(ids).logits[:, -1, first : first + vocabulary.rows].float()
        logits[:, torch.from_numpy(~vocabulary.active_mask)] = -torch.inf
        scores: FloatArray = torch.log_softmax(logits, dim=-1).numpy()
        return scores

    def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """What an engine must answer."""
        model = request.model
        return beam_search(
            lambda prefixes: self.score(request.prompt_token_ids, prefixes, model.vocabulary),
            model.index,
            model.vocabulary,
            request.filter(),
            request.beam_width,
            request.k,
        )
