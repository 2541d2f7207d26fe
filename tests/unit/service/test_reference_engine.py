"""ReferenceEngine on a tiny random Llama, against the model run plainly on every item."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gti_core.bundle.delta import Rows
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex, ScoredRow, exhaustive_search
from gti_core.types import FloatArray, Sid
from gti_core.vocabulary import SidVocabulary
from service.context import ServingContext
from service.engine import reference
from service.engine.base import (
    DecodeRequest,
    EngineDeadError,
    EngineError,
    PromptTooLongError,
    ServingModel,
)
from service.engine.reference import ReferenceEngine, load_causal_lm

PROMPT = [3, 1, 4, 16, 21, 25]


@pytest.fixture
def llama_model(tmp_path: Path, tiny_context: ServingContext) -> ServingModel:
    """The tiny catalogue behind a random Llama: 16 base tokens and 15 SID rows."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tiny_context.model(tmp_path / "model")


def run(model: ServingModel, *requests: DecodeRequest) -> list[list[ScoredRow]]:
    async def work() -> list[list[ScoredRow]]:
        engine = ReferenceEngine(model)
        await engine.start()
        try:
            return list(await asyncio.gather(*(engine.decode(request) for request in requests)))
        finally:
            await engine.stop()

    return asyncio.run(work())


def plain_logprobs(lm: Any, vocabulary: SidVocabulary, prompt: Sequence[int], prefix: Sid) -> Any:
    """One forward pass of the whole sequence, no cache; log-softmax by hand in numpy."""
    ids = torch.tensor([[*prompt, *vocabulary.token_ids(prefix)]])
    with torch.no_grad():
        logits = lm(ids, use_cache=False).logits[0, -1].double().numpy()
    rows = logits[vocabulary.first_token_id :][: vocabulary.rows]
    return rows - np.log(np.exp(rows[vocabulary.active_mask]).sum())


@pytest.mark.parametrize("rows_per_pass", [32, 5, 1])
@pytest.mark.parametrize("excluded", [frozenset(), frozenset({1, 5, 9})])
def test_wide_beam_equals_scoring_every_item(
    llama_model: ServingModel,
    monkeypatch: pytest.MonkeyPatch,
    rows_per_pass: int,
    excluded: frozenset[int],
) -> None:
    monkeypatch.setattr(reference, "ROWS_PER_PASS", rows_per_pass)
    lm = load_causal_lm(llama_model.model_dir)
    vocabulary, items = llama_model.vocabulary, llama_model.catalog.items

    def score(prefixes: Sequence[Sid]) -> FloatArray:
        return np.stack([plain_logprobs(lm, vocabulary, PROMPT, prefix) for prefix in prefixes])

    expected = exhaustive_search(
        score,
        [item.sid for item in items],
        vocabulary,
        12,
        frozenset(items[row].sid for row in excluded),
    )
    [found] = run(llama_model, DecodeRequest(llama_model, "r", PROMPT, 12, 12, excluded))
    assert [row.sid for row in found] == [sid for sid, _ in expected]
    assert [row.logprob for row in found] == pytest.approx([s for _, s in expected], abs=1e-4)
    assert all(items[row.row].sid == row.sid for row in found)
    # The random model must tell items apart, or the comparison above says little.
    assert expected[0][1] - expected[-1][1] > 1


def test_requests_do_not_mix(llama_model: ServingModel) -> None:
    requests = [
        DecodeRequest(llama_model, "a", PROMPT, 3, 6),
        DecodeRequest(llama_model, "b", [*PROMPT, 17, 22, 26], 5, 12),
        DecodeRequest(llama_model, "c", [5], 12, 12),
    ]
    together = run(llama_model, *requests)
    alone = [run(llama_model, request)[0] for request in requests]
    assert together == alone
    assert [len(found) for found in together] == [3, 5, 12]


def test_nothing_admissible(llama_model: ServingModel) -> None:
    assert run(
        llama_model, DecodeRequest(llama_model, "r", PROMPT, 5, 5, frozenset(range(12)))
    ) == [[]]


def test_prompt_too_long(llama_model: ServingModel) -> None:
    with pytest.raises(PromptTooLongError):
        run(llama_model, DecodeRequest(llama_model, "r", [1] * (llama_model.max_tokens - 2), 1, 1))


def test_missing_folder(llama_model: ServingModel, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing-here"):
        run(replace(llama_model, model_dir=tmp_path / "nothing-here"))


def test_model_without_the_sid_rows(llama_model: ServingModel) -> None:
    vocabulary = SidVocabulary((5, 4, 7), (4, 3, 4), 16)
    with pytest.raises(EngineError, match=r"has 31 tokens.*ends at 32"):
        run(replace(llama_model, vocabulary=vocabulary))


def test_model_too_short_for_the_prompt(llama_model: ServingModel) -> None:
    with pytest.raises(EngineError, match=r"takes 64 tokens.*needs 65"):
        run(replace(llama_model, max_tokens=65))


def test_cancelled_work_ends_at_the_next_level(
    llama_model: ServingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    prefill, extend = reference.Scorer.prefill, reference.Scorer.extend
    extended: list[str] = []

    def slow_prefill(self: reference.Scorer, prompt: Sequence[int]) -> Any:
        entered.set()
        release.wait(10)
        return prefill(self, prompt)

    def counted_extend(self: reference.Scorer, cache: Any, prefixes: Sequence[Sid]) -> Any:
        extended.append("level")
        return extend(self, cache, prefixes)

    monkeypatch.setattr(reference.Scorer, "prefill", slow_prefill)
    monkeypatch.setattr(reference.Scorer, "extend", counted_extend)

    async def work() -> None:
        engine = ReferenceEngine(llama_model)
        await engine.start()
        first = asyncio.create_task(engine.decode(DecodeRequest(llama_model, "1", PROMPT, 3, 3)))
        await asyncio.to_thread(entered.wait, 10)
        queued = asyncio.create_task(engine.decode(DecodeRequest(llama_model, "2", PROMPT, 3, 3)))
        await asyncio.sleep(0)
        for task in (first, queued):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        release.set()
        assert len(await engine.decode(DecodeRequest(llama_model, "3", PROMPT, 3, 3))) == 3
        await engine.stop()

    asyncio.run(work())
    assert extended == ["level"] * 2  # the third request's two further levels, nobody else's


def test_life(llama_model: ServingModel) -> None:
    async def work() -> None:
        engine = ReferenceEngine(llama_model)
        with pytest.raises(EngineDeadError):
            await engine.check()
        await engine.start()
        await engine.check()
        assert engine.info()["dtype"] == "float32"
        running = asyncio.create_task(engine.decode(DecodeRequest(llama_model, "r", PROMPT, 3, 3)))
        queued = asyncio.create_task(engine.decode(DecodeRequest(llama_model, "q", PROMPT, 3, 3)))
        await asyncio.sleep(0)
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineDeadError):
            await queued
        # The one under way either got through or was given up at a level.
        [outcome] = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(outcome, EngineDeadError | list)
        with pytest.raises(EngineDeadError):
            await engine.decode(DecodeRequest(llama_model, "r", PROMPT, 3, 3))
        with pytest.raises(EngineDeadError):
            await engine.check()

    asyncio.run(work())


def test_nan_is_an_engine_error(llama_model: ServingModel) -> None:
    lm = load_causal_lm(llama_model.model_dir)
    lm.lm_head.weight.data[19] = torch.nan  # level 0, code 3: active
    lm.save_pretrained(llama_model.model_dir)
    with pytest.raises(EngineError, match="NaN"):
        run(llama_model, DecodeRequest(llama_model, "r", PROMPT, 3, 3))


def test_reserved_rows_change_nothing(llama_model: ServingModel) -> None:
    request = DecodeRequest(llama_model, "r", PROMPT, 12, 12)
    before = run(llama_model, request)
    lm = load_causal_lm(llama_model.model_dir)
    lm.lm_head.weight.data[20] = torch.nan  # level 0, code 4: reserved
    lm.lm_head.weight.data[:16] = 1e4  # the backbone's own tokens
    lm.save_pretrained(llama_model.model_dir)
    assert run(llama_model, request) == before


NUMBERS = [4, 8, 14]
"""Reserved rows: level 0, code 4; level 1, code 3; level 2, code 5."""


def next_version(model: ServingModel) -> ServingModel:
    """Three items more at codes that were reserved; code 4 of level 2 stays out."""
    sids = [(4, 0, 0), (0, 3, 1), (1, 1, 5)]
    items = [Item(f"new-{number}", sid) for number, sid in enumerate(sids)]
    catalog = ItemCatalog([*model.catalog.items, *items])
    vocabulary = model.vocabulary.activate(0).activate(1).skip_to(2, 5).activate(2)
    index = ConstraintIndex(catalog.sids)
    return replace(model, catalog=catalog, index=index, vocabulary=vocabulary, version=2)


def new_rows(tied: bool, seed: int = 0) -> Rows:
    blocks = 0.3 * np.random.default_rng(seed).standard_normal((2, 3, 32)).astype(np.float32)
    return Rows(np.array(NUMBERS), blocks[0], None if tied else blocks[1])


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def either(request: pytest.FixtureRequest, llama_model: ServingModel) -> ServingModel:
    if request.param:
        lm = load_causal_lm(llama_model.model_dir)
        lm.config.tie_word_embeddings = True
        lm.tie_weights()
        lm.save_pretrained(llama_model.model_dir)
    return llama_model


def test_a_swapped_engine_equals_a_freshly_loaded_one(either: ServingModel, tmp_path: Path) -> None:
    lm = load_causal_lm(either.model_dir)
    tied = bool(lm.config.tie_word_embeddings)
    second, rows = next_version(either), new_rows(tied)
    ids = torch.tensor(NUMBERS) + second.vocabulary.first_token_id
    with torch.no_grad():
        lm.get_input_embeddings().weight[ids] = torch.from_numpy(rows.rows_in)
        if rows.rows_out is not None:
            lm.get_output_embeddings().weight[ids] = torch.from_numpy(rows.rows_out)
    lm.save_pretrained(tmp_path / "fresh")
    history = [3, 1, 4, *second.vocabulary.token_ids((0, 3, 1))]
    requests = [DecodeRequest(second, "r", prompt, 15, 15) for prompt in (PROMPT, history)]
    fresh = run(replace(second, model_dir=tmp_path / "fresh"), *requests)
    stale = run(second, *requests)
    old = DecodeRequest(either, "old", PROMPT, 12, 12)

    async def work() -> None:
        engine = ReferenceEngine(either)
        await engine.start()
        before = await engine.decode(old)
        await engine.publish(second, rows=rows)
        swapped = [await engine.decode(request) for request in requests]
        assert swapped == fresh
        assert {row.row for row in swapped[0]} >= {12, 13, 14}
        # The rows matter on both sides, or the comparison says little.
        assert np.abs(scores(swapped[0]) - scores(stale[0])).max() > 0.1
        assert np.abs(scores(swapped[1]) - scores(stale[1]))[:12].max() > 0.1
        assert await engine.decode(old) == before
        await engine.publish(either)
        assert await engine.decode(old) == before
        await engine.stop()

    asyncio.run(work())


def scores(found: Sequence[ScoredRow]) -> FloatArray:
    by_row = {row.row: row.logprob for row in found}
    return np.array([by_row[row] for row in range(15)])


def test_requests_under_way_keep_their_version(
    llama_model: ServingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = next_version(llama_model)
    request = DecodeRequest(llama_model, "old", PROMPT, 12, 12)
    [alone] = run(llama_model, request)
    entered, release = threading.Event(), threading.Event()
    prefill = reference.Scorer.prefill

    def slow_prefill(self: reference.Scorer, prompt: Sequence[int]) -> Any:
        entered.set()
        release.wait(10)
        return prefill(self, prompt)

    monkeypatch.setattr(reference.Scorer, "prefill", slow_prefill)

    async def work() -> None:
        engine = ReferenceEngine(llama_model)
        await engine.start()
        running = asyncio.create_task(engine.decode(request))
        await asyncio.to_thread(entered.wait, 10)
        queued = asyncio.create_task(engine.decode(request))
        await asyncio.sleep(0)
        publish = asyncio.create_task(engine.publish(second, rows=new_rows(tied=False)))
        await asyncio.sleep(0)
        assert engine.model is llama_model  # not before the rows are written
        release.set()
        await publish
        assert engine.model is second
        assert await running == await queued == alone
        after = await engine.decode(DecodeRequest(second, "new", PROMPT, 15, 15))
        assert {row.row for row in after} == set(range(15))
        await engine.stop()

    asyncio.run(work())


def test_a_publish_that_fails_leaves_the_old_version(llama_model: ServingModel) -> None:
    second, request = next_version(llama_model), DecodeRequest(llama_model, "r", PROMPT, 12, 12)

    async def work() -> None:
        engine = ReferenceEngine(llama_model)
        with pytest.raises(EngineDeadError):
            await engine.publish(second)
        await engine.start()
        before = await engine.decode(request)
        with pytest.raises(EngineError, match="untied and needs"):
            await engine.publish(second, rows=new_rows(tied=True))
        assert engine.model is llama_model
        await engine.publish(second, rows=new_rows(tied=False))
        await engine.publish(llama_model)
        # What the second version has used is spoken for, also after the way back.
        with pytest.raises(EngineError, match="reached would change"):
            await engine.publish(second, rows=new_rows(tied=False, seed=1))
        assert engine.model is llama_model
        assert await engine.decode(request) == before
        await engine.stop()
        with pytest.raises(EngineDeadError):
            await engine.publish(second)

    asyncio.run(work())
