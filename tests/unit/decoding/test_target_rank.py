"""The rank of one item, against its place in the list of the whole search."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_beam_search import catalogues, setting

from gti_core.catalog import Item, ItemCatalog
from gti_core.data.splits import EvalCase
from gti_core.decoding import BeamSearch, ConstraintIndex
from gti_core.decoding.cached import run_searches
from gti_core.decoding.target import TargetSearch
from gti_core.evaluation.metrics import ranks_of_targets
from gti_core.lm import SidLM
from gti_core.pipeline.evaluate import EvaluateOptions, rank_cases, rank_targets
from gti_core.prompts import AppendOnlyPrompt
from gti_core.testing import FAMILIES, VOCABULARY, tiny_model
from gti_core.vocabulary import SidVocabulary


def run(search, score) -> int:
    """Drive a search to its end; how many prefixes were scored."""
    scored = 0
    while not search.done:
        prefixes = [beam.prefix for beam in search.frontier]
        scored += len(prefixes)
        search.advance(score(prefixes))
    return scored


@given(catalogues, st.integers(0, 2**31), st.integers(1, 70), st.data())
def test_the_rank_is_the_place_in_the_whole_search(sids, seed, width, data):
    excluded = data.draw(st.sets(st.sampled_from(sids)))
    target = data.draw(st.sampled_from(sids))
    index, vocabulary, score = setting(sids, seed)
    admissible = index.admissible([sids.index(sid) for sid in excluded])
    whole = BeamSearch(index, vocabulary, admissible, width)
    run(whole, score)
    found = [item.sid for item in whole.results(width)] if admissible.total else []
    asked = TargetSearch(index, vocabulary, admissible, width, target)
    run(asked, score)
    assert asked.rank == (found.index(target) + 1 if target in found else 0)


def test_what_cannot_matter_is_not_scored():
    sids = [(a, b, c) for a in range(5) for b in range(5) for c in range(5)]
    index, vocabulary, score = setting(sids, 7)
    whole = BeamSearch(index, vocabulary, index.admissible(), 125)
    all_of_it = run(whole, score)
    best = whole.results(1)[0].sid
    asked = TargetSearch(index, vocabulary, index.admissible(), 125, best)
    assert run(asked, score) < all_of_it / 3
    assert asked.rank == 1
    last = whole.results(125)[-1].sid
    asked = TargetSearch(index, vocabulary, index.admissible(), 3, last)
    assert run(asked, score) <= 1 + 2 + 3 + 3
    assert asked.rank == 0


VOCAB = SidVocabulary((4, 5, 6), (4, 5, 4), VOCABULARY)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_of_cases_equal_those_of_their_lists(family):
    torch.manual_seed(3)
    model = tiny_model(family, tied=True)
    lm = SidLM(model, VOCAB, torch.randn(VOCAB.rows, 32)).eval()
    rng = np.random.default_rng(5)
    every = [(a, b, c) for a in range(4) for b in range(5) for c in range(4)]
    catalog = ItemCatalog(
        [
            Item(f"i{n}", every[place])
            for n, place in enumerate(rng.choice(len(every), 45, replace=False))
        ]
    )
    prompt = AppendOnlyPrompt("x", (5, 6), 12, 2)
    cases = []
    for _ in range(60):
        *history, target = rng.choice(45, int(rng.integers(2, 14)), replace=False)
        cases.append(EvalCase("u", tuple(f"i{row}" for row in history), f"i{target}"))
    cases.append(EvalCase("u", ("i1", "i2"), "i1"))  # the target stands in its own history
    options = EvaluateOptions(ks=(3, 10), beam_width=10, batch_size=7)
    targets = np.array([catalog.row(case.target) for case in cases])
    expected = ranks_of_targets(rank_cases(lm, catalog, prompt, cases, options), targets)
    found = rank_targets(lm, catalog, prompt, cases, options)
    assert found.tolist() == expected.tolist()
    assert found[-1] == 0
    assert len(set(found.tolist())) > 5


def test_a_search_that_ends_early_leaves_its_batch_alone():
    lm = SidLM(tiny_model("llama", tied=True), VOCAB, torch.randn(VOCAB.rows, 32)).eval()
    sids = [(a, b, c) for a in range(4) for b in range(5) for c in range(3)]
    index = ConstraintIndex(np.array(sids, dtype=np.int32))
    whole = BeamSearch(index, VOCAB, index.admissible(), len(sids))
    run_searches(lm, [[5, 6, 7]], [whole])
    ranked = [item.sid for item in whole.results(len(sids))]
    asked = [ranked[-1], ranked[0], ranked[9]]
    searches = [TargetSearch(index, VOCAB, index.admissible(), 12, target) for target in asked]
    run_searches(lm, [[5, 6, 7]] * 3, searches)
    assert [search.rank for search in searches] == [0, 1, 10]
