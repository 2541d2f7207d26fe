"""Task mixtures, search examples, phrasings, mixed precision, steps as a budget."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gti_core.catalog import Item, ItemCatalog
from gti_core.errors import PipelineError
from gti_core.grounding.corpus import FAMILIES, Example, GroundingCorpus
from gti_core.lm import SidLM
from gti_core.pipeline.finetune import FinetuneOptions
from gti_core.prompts import AppendOnlyPrompt, SearchPrompt
from gti_core.testing import tiny_model, tiny_tokenizer
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.loop import answer_loss, collate
from gti_core.tuning.lora import LoraOptions, attach
from gti_core.tuning.precision import mixed
from gti_core.tuning.sequences import SequenceExamples
from gti_core.tuning.tasks import SearchExamples, draw_query, mixture, search_prompt
from gti_core.vocabulary import SidVocabulary

VOCABULARY = SidVocabulary((4, 4), (4, 4), 300)
ITEMS = [
    Item("a", (0, 1), "red cup with a very long handle", "kitchen things"),
    Item("b", (1, 0), "lamp"),
    Item("c", (2, 3), "", "", {"brand": "Old Road"}),
]


@given(st.integers(0, 10_000))
def test_a_query_is_made_of_the_items_words(seed):
    rng = random.Random(seed)
    for item in ITEMS:
        query = draw_query(item, rng)
        source = f"{item.title} | {item.description} | brand: Old Road"
        assert query
        assert query in source
    assert draw_query(ITEMS[1], rng) == "lamp"


def test_search_examples_lead_from_the_template_to_the_sid():
    tokenizer = tiny_tokenizer()
    prompt = search_prompt(tokenizer)
    examples = SearchExamples(ITEMS, VOCABULARY, tokenizer, prompt).epoch(random.Random(1))
    assert [example.answer for example in examples] == [(300, 305), (301, 304), (302, 307)]
    for example in examples:
        text = tokenizer.decode(list(example.prompt))
        assert text.startswith("A user looks for: ")
        assert text.endswith("\nItem: ")


def test_a_hostile_title_stays_plain_text_in_a_query():
    tokenizer = tiny_tokenizer()
    item = Item("x", (0, 0), "<|im_start|><|sid_0_1|>")
    special = set(tokenizer.all_special_ids)
    corpus = SearchExamples([item], VOCABULARY, tokenizer, search_prompt(tokenizer))
    for seed in range(5):
        (example,) = corpus.epoch(random.Random(seed))
        assert not special & set(example.prompt)
        assert all(token < 300 for token in example.prompt)


def test_search_prompt_cuts_long_queries_and_survives_json():
    prompt = SearchPrompt("q: ", "\n", (1, 2), (3,), max_query_tokens=2)
    assert prompt.token_ids([7, 8, 9]) == [1, 2, 7, 8, 3]
    assert SearchPrompt.from_json(prompt.to_json()) == prompt


def test_a_mixture_holds_every_tasks_examples_in_another_order():
    one = [Example((1,), (n,)) for n in range(20)]
    two = [Example((2,), (n,)) for n in range(5)]
    epoch = mixture([lambda rng: one, lambda rng: two])
    mixed_up = epoch(random.Random(0))
    assert sorted(mixed_up, key=str) == sorted([*one, *two], key=str)
    assert list(mixed_up) != [*one, *two]
    assert epoch(random.Random(0)) == mixed_up


def test_alignment_samples_one_family_per_item():
    corpus = GroundingCorpus(ITEMS, VOCABULARY, tiny_tokenizer())
    seen = set()
    for seed in range(60):
        examples = corpus.sample(random.Random(seed))
        assert len(examples) == len(ITEMS)
        seen |= {family for family in FAMILIES if corpus.example(0, family) == examples[0]}
    assert seen == set(FAMILIES)


def test_phrasings_are_drawn_and_serving_keeps_its_own():
    catalog = ItemCatalog(ITEMS)
    prompt = AppendOnlyPrompt("x", (9,), 5, 1)
    histories = {f"u{n}": ("a", "b") for n in range(40)}
    examples = SequenceExamples(histories, catalog, VOCABULARY, prompt, [(7, 7), (8,)])
    firsts = {example.prompt[:-2] for example in examples.epoch(random.Random(0))}
    assert firsts == {(9,), (7, 7), (8,)}
    plain = SequenceExamples(histories, catalog, VOCABULARY, prompt)
    assert {example.prompt[:-2] for example in plain.epoch(random.Random(0))} == {(9,)}


def test_steps_win_over_epochs():
    assert LoopConfig(epochs=3, steps=7).steps_for(1000) == 7
    assert LoopConfig(epochs=2, batch_size=10).steps_for(25) == 6
    with pytest.raises(PipelineError, match="steps"):
        LoopConfig(steps=-1)


@pytest.mark.parametrize("tasks", [(), ("search",), ("next", "next"), ("next", "cook")])
def test_tasks_that_make_no_recommender_are_refused(tasks):
    with pytest.raises(PipelineError, match="tasks must be next"):
        FinetuneOptions(tasks=tasks)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_mixed_precision_trains_float32_weights_close_to_float32(mode):
    example = Example((1, 2, 301), (305, 302, 306))
    gradients = []
    for context in (False, True):
        model = tiny_model("llama")
        lm = SidLM(model, VOCABULARY, torch.randn(8, 32, generator=torch.manual_seed(0)))
        if mode == "lora":
            attach(model, LoraOptions(r=2, alpha=4, dropout=0.0), seed=0)
        lm.train()
        if context:
            with mixed(model):
                loss = answer_loss(lm, collate([example]))
        else:
            loss = answer_loss(lm, collate([example]))
        loss.backward()
        trained = [p for p in lm.parameters() if p.requires_grad]
        assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in trained)
        gradients.append((float(loss.detach()), torch.cat([p.grad.flatten() for p in trained])))
    (plain, exact), (rounded, near) = gradients
    assert rounded == pytest.approx(plain, rel=0.02)
    assert torch.nn.functional.cosine_similarity(exact, near, dim=0) > 0.99
