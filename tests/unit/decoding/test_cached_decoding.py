"""Decoding with a KV cache against exhaustive scoring without one, every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gti_core.decoding import BeamSearch, ConstraintIndex, exhaustive_search
from gti_core.decoding.cached import _run_copies, run_searches
from gti_core.decoding.tree import attention_window, columns_needed, run_tree
from gti_core.errors import DecodingError
from gti_core.lm import SidLM
from gti_core.testing import FAMILIES, VOCABULARY, tiny_model
from gti_core.vocabulary import SidVocabulary

VOCAB = SidVocabulary((4, 5, 6), (4, 5, 4), VOCABULARY)


def catalogue(seed: int, count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    every = [(a, b, c) for a in range(4) for b in range(5) for c in range(4)]
    return [every[i] for i in rng.choice(len(every), count, replace=False)]


def build(family: str, tied: bool) -> SidLM:
    model = tiny_model(family, tied=tied)
    torch.manual_seed(11)
    rows = torch.randn(VOCAB.rows, 32)
    return SidLM(model, VOCAB, rows, None if tied else torch.randn(VOCAB.rows, 32)).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_scoring_every_item_alone(family, tied):
    lm = build(family, tied)
    sids = catalogue(3, 30)
    index = ConstraintIndex(np.array(sids, dtype=np.int32))
    prompts = [[5, 6, 7], list(range(3, 25)), [9, VOCABULARY + 2, VOCABULARY + 5, VOCABULARY + 10]]
    excluded = [frozenset(), frozenset(sids[:7]), frozenset(sids)]
    searches = [
        BeamSearch(index, VOCAB, index.admissible([sids.index(s) for s in out]), 30)
        for out in excluded
    ]
    run_searches(lm, prompts, searches)
    for prompt, out, search in zip(prompts, excluded, searches, strict=True):

        def score(prefixes, prompt=prompt):
            ids = torch.tensor([[*prompt, *VOCAB.token_ids(prefixes[0])]])
            with torch.inference_mode():
                logits = lm.sid_logits(lm.hidden(ids)[:, -1])
            return torch.log_softmax(logits, -1).numpy()

        expected = exhaustive_search(score, sids, VOCAB, 30, out)
        found = search.results(30)
        assert [item.sid for item in found] == [sid for sid, _ in expected]
        assert [item.logprob for item in found] == pytest.approx(
            [value for _, value in expected], abs=2e-4
        )


def test_a_narrow_beam_in_a_batch_equals_the_same_beam_alone():
    lm = build("llama", True)
    sids = catalogue(4, 40)
    index = ConstraintIndex(np.array(sids, dtype=np.int32))
    prompts = [[7, 8], [9, 10, 11, 12, 13], [3]]
    together = [BeamSearch(index, VOCAB, index.admissible(), w) for w in (2, 5, 11)]
    run_searches(lm, prompts, together)
    for prompt, width, search in zip(prompts, (2, 5, 11), together, strict=True):
        alone = BeamSearch(index, VOCAB, index.admissible(), width)
        run_searches(lm, [prompt], [alone])
        assert [b.prefix for b in alone.frontier] == [b.prefix for b in search.frontier]
        assert len(alone.frontier) == width


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_the_prompt_equals_copying_it(family):
    lm = build(family, True)
    sids = catalogue(6, 45)
    index = ConstraintIndex(np.array(sids, dtype=np.int32))
    prompts = [[4, 9, 12, 13], [8], [9, VOCABULARY + 2, VOCABULARY + 5, VOCABULARY + 10, 3]]
    widths = (3, 1, 9)
    shared = [BeamSearch(index, VOCAB, index.admissible([2, 5]), w) for w in widths]
    copied = [BeamSearch(index, VOCAB, index.admissible([2, 5]), w) for w in widths]
    if family == "gpt_neo":
        assert attention_window(lm.backbone) == 16
        assert columns_needed(prompts, shared) > 16
        lm.backbone.config.window_size = 64
        for block in lm.backbone.transformer.h:
            attention = block.attn.attention
            attention.bias = torch.ones_like(attention.bias).tril()
    run_tree(lm, prompts, shared)
    _run_copies(lm, prompts, copied, range(3))
    for one, other in zip(shared, copied, strict=True):
        assert [beam.prefix for beam in one.frontier] == [beam.prefix for beam in other.frontier]
        assert [beam.logprob for beam in one.frontier] == pytest.approx(
            [beam.logprob for beam in other.frontier], abs=2e-4
        )


def test_an_empty_prompt_is_refused():
    lm = build("llama", True)
    index = ConstraintIndex(np.array([[0, 0, 0]], dtype=np.int32))
    with pytest.raises(DecodingError, match="at least one token"):
        run_searches(lm, [[]], [BeamSearch(index, VOCAB, index.admissible(), 1)])
