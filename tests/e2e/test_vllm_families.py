"""Beams inside vLLM's worker for the other families: Qwen3 and GPT-2, tiny and random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from loop_thread import LoopThread
from marks import STARTS_VLLM
from tiny_llama import BASE_TOKENS, Oracle

from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex
from gti_core.vocabulary import SidVocabulary
from service.engine.base import DecodeRequest, EngineError, ServingModel
from service.engine.vllm_engine import VllmEngine, VllmOptions

pytestmark = STARTS_VLLM

SIZES = (6, 7, 5, 9)


def serving_model(folder: Path, config: Any) -> ServingModel:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = SidVocabulary(SIZES, (6, 7, 5, 8), BASE_TOKENS)
    every = np.stack(np.unravel_index(np.arange(6 * 7 * 5 * 8), (6, 7, 5, 8)), axis=1)
    chosen = every[np.random.default_rng(4).choice(len(every), 300, replace=False)]
    catalog = ItemCatalog([Item(f"i{n}", tuple(map(int, sid))) for n, sid in enumerate(chosen)])
    # Every seventh item is out of service.
    index = ConstraintIndex(catalog.sids).with_availability(range(0, 300, 7), False)
    return ServingModel(folder, vocabulary, catalog, index, 80)


def config_of(family: str) -> Any:
    rows = BASE_TOKENS + sum(SIZES)
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=rows, n_embd=64, n_layer=2, n_head=2, n_positions=128,
            initializer_range=0.2, bos_token_id=0, eos_token_id=0, dtype="float32",
        )  # fmt: skip
    return transformers.Qwen3Config(
        vocab_size=rows, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        initializer_range=0.2, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_four_levels_equal_the_oracle(family: str, tmp_path: Path) -> None:
    model = serving_model(tmp_path / "model", config_of(family))
    engine = VllmEngine(model, VllmOptions(dtype="float32", kv_cache_gib=0.0625))
    oracle = Oracle(model)
    with LoopThread() as loop:
        try:
            loop.run(engine.start(), timeout=600)
            for length, width in ((1, 5), (30, 20), (31, 120), (64, 40)):
                prompt = [2 + (13 * i + length) % 90 for i in range(length)]
                request = DecodeRequest(model, f"{length}", prompt, min(width, 20), width)
                got, want = loop.run(engine.decode(request)), oracle.decode(request)
                assert [item.sid for item in got] == [item.sid for item in want]
                assert all(item.row % 7 for item in got)
                assert [item.logprob for item in got] == pytest.approx(
                    [item.logprob for item in want], abs=1e-3
                )
        finally:
            loop.run(engine.stop())


def test_an_architecture_without_beams_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=BASE_TOKENS + sum(SIZES), hidden_size=32, num_layers=2, num_heads=2,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=128,
    )  # fmt: skip
    model = serving_model(tmp_path / "model", config)
    with LoopThread() as loop, pytest.raises(EngineError, match="vllm-per-beam"):
        loop.run(VllmEngine(model).start())
