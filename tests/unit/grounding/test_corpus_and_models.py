"""The six prompt families, hostile texts, and models that can't take rows."""

from __future__ import annotations

import random

import pytest
import torch

from gti_core.catalog import Item
from gti_core.errors import DataError, UnsupportedModelError
from gti_core.grounding.corpus import FAMILIES, GroundingCorpus, families_of
from gti_core.grounding.diagnostics import effective_rank, mean_cosine
from gti_core.lm import SidLM, check_rows_act_as_rows, encode_text
from gti_core.testing import VOCABULARY, tiny_model, tiny_tokenizer
from gti_core.vocabulary import SidVocabulary

VOCAB = SidVocabulary((3, 4), (3, 3), VOCABULARY)


def test_all_six_families_of_a_described_item():
    tokenizer = tiny_tokenizer()
    corpus = GroundingCorpus([Item("a", (2, 1), "red cup", "a small cup")], VOCAB, tokenizer)
    sid = tuple(VOCAB.token_ids((2, 1)))
    for family in FAMILIES:
        example = corpus.example(0, family)
        whole = example.prompt + example.answer
        text = tokenizer.decode([i for i in whole if i < VOCABULARY], skip_special_tokens=True)
        assert ("red cup" in text) == ("title" in family or "both" in family)
        assert ("a small cup" in text) == ("description" in family or "both" in family)
        if family.endswith("to_sid"):
            assert example.answer == sid
            assert not set(example.prompt) & set(sid)
        else:
            assert [i for i in example.prompt if i >= VOCABULARY] == list(sid)
            assert example.answer[-1] == tokenizer.eos_token_id
            assert max(example.answer) < VOCABULARY


def test_families_follow_the_text_that_is_there():
    assert families_of(Item("a", (0,), "t")) == ["title_to_sid", "sid_to_title"]
    assert families_of(Item("a", (0,), "", "d")) == ["description_to_sid", "sid_to_description"]
    assert set(families_of(Item("a", (0,), "t", "", {"genres": ["x"]}))) == set(FAMILIES)
    with pytest.raises(DataError, match="'a' has no text"):
        GroundingCorpus([Item("a", (0, 0), "  ")], VOCAB, tiny_tokenizer())


def test_an_epoch_has_both_directions_of_every_item_and_depends_on_the_seed_alone():
    items = [Item(str(n), (n % 3, n % 2), f"red cup {n}") for n in range(4)]
    items = [items[0], items[1]]
    corpus = GroundingCorpus(items, VOCAB, tiny_tokenizer())
    epoch = corpus.epoch(random.Random(1))
    assert epoch == corpus.epoch(random.Random(1))
    assert len(epoch) == 4
    assert sum(example.answer[0] >= VOCABULARY for example in epoch) == 2


@pytest.mark.parametrize(
    "text", ["<|im_start|>system", "a <|sid_0_1|> b", "<|endoftext|>", "\x00\x07\u202e", "😀" * 50]
)
def test_hostile_text_yields_no_special_and_no_sid_token(text):
    tokenizer = tiny_tokenizer()
    ids = encode_text(tokenizer, text)
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert all(i < VOCABULARY for i in ids)
    corpus = GroundingCorpus([Item("a", (0, 0), text + " cup")], VOCAB, tokenizer)
    assert not set(corpus.example(0, "title_to_sid").prompt) & set(tokenizer.all_special_ids)


def test_effective_rank_and_cosine_by_hand():
    assert effective_rank(torch.eye(5)) == pytest.approx(5.0)
    assert effective_rank(torch.ones(5, 3)) == pytest.approx(1.0)
    assert mean_cosine(torch.ones(5, 3)) == pytest.approx(1.0)
    assert mean_cosine(torch.eye(4)) == pytest.approx(0.0)


def test_models_whose_rows_would_not_act_as_rows_are_refused():
    model = tiny_model("llama", tied=False)
    head = model.get_output_embeddings()
    model.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=True)
    with pytest.raises(UnsupportedModelError, match="bias"):
        check_rows_act_as_rows(model)

    class Scaled(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            out = self.inner(*args, **kwargs)
            out.logits = out.logits * 3
            return out

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    with pytest.raises(UnsupportedModelError, match="scales"):
        check_rows_act_as_rows(Scaled(tiny_model("llama")))


def test_rows_must_start_behind_the_backbone():
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="start at 7"):
        SidLM(model, SidVocabulary((3,), (3,), 7), torch.zeros(3, 32))
    with pytest.raises(UnsupportedModelError, match="tied"):
        SidLM(model, VOCAB, torch.zeros(7, 32), torch.zeros(7, 32))
