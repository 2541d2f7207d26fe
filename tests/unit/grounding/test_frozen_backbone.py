"""Grounding touches nothing but the new rows: every family, tied and untied."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gti_core.catalog import Item
from gti_core.grounding.corpus import GroundingCorpus
from gti_core.grounding.initialize import mean_rows, random_rows
from gti_core.lm import SidLM, is_tied
from gti_core.testing import FAMILIES, VOCABULARY, WIDTH, tiny_model, tiny_tokenizer
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.loop import Examples, answer_loss, collate, train
from gti_core.vocabulary import SidVocabulary

VOCAB = SidVocabulary((3, 4), (3, 3), VOCABULARY)
ITEMS = [
    Item("a", (0, 1), "red cup", "a small cup"),
    Item("b", (1, 0), "blue chair", "an old chair"),
    Item("c", (2, 2), "green lamp", "a new lamp"),
]


def grounded_model(family: str, tied: bool) -> SidLM:
    model = tiny_model(family, tied=tied)
    model.requires_grad_(False)
    assert is_tied(model) is tied
    rows = mean_rows(model.get_input_embeddings().weight, VOCAB.rows)
    out = None if tied else mean_rows(model.get_output_embeddings().weight, VOCAB.rows)
    return SidLM(model, VOCAB, rows, out)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_new_rows_change(family, tied, tmp_path):
    lm = grounded_model(family, tied)
    before = {name: p.detach().clone() for name, p in lm.backbone.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in lm.backbone.named_buffers()}
    rows_in = lm.rows_in.detach().clone()
    rows_out = lm.output_rows.detach().clone()
    corpus = GroundingCorpus(ITEMS, VOCAB, tiny_tokenizer())
    config = LoopConfig(epochs=4, batch_size=3, rows_lr=0.05, warmup=1)
    losses = train(lm, Examples(corpus.epoch, config), config, tmp_path, identity="x").losses
    after = dict(lm.backbone.named_parameters())
    assert set(after) == set(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    for name, value in buffers.items():
        assert torch.equal(dict(lm.backbone.named_buffers())[name], value), name
    active = torch.from_numpy(VOCAB.active_mask.copy())
    assert not torch.equal(lm.rows_in[active], rows_in[active])
    assert not torch.equal(lm.output_rows[active], rows_out[active])
    assert torch.equal(lm.rows_in[~active], rows_in[~active]), "reserved rows stay as they were"
    assert torch.equal(lm.output_rows[~active], rows_out[~active])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_the_rows_equals_that_of_a_resized_model(family, tied):
    """SidLM's separate rows act as rows of one big matrix (the paper masks that gradient)."""
    torch.manual_seed(1)
    lm = grounded_model(family, tied)
    with torch.no_grad():
        lm.rows_in.add_(torch.randn_like(lm.rows_in) * 0.1)
        if not tied:
            lm.rows_out.add_(torch.randn_like(lm.rows_out) * 0.1)
    corpus = GroundingCorpus(ITEMS, VOCAB, tiny_tokenizer())
    examples = [corpus.example(0, "sid_to_title"), corpus.example(1, "sid_to_both")]
    batch = collate(examples)
    # Reserved rows are outside SidLM's softmax; take them out of the big model's as well.
    loss = answer_loss(lm, batch)
    loss.backward()
    big = tiny_model(family, tied=tied)
    big.resize_token_embeddings(VOCABULARY + VOCAB.rows, mean_resizing=False)
    with torch.no_grad():
        big.get_input_embeddings().weight[VOCABULARY:] = lm.rows_in
        if not tied:
            big.get_output_embeddings().weight[VOCABULARY:] = lm.rows_out
    logits = big(input_ids=batch.ids).logits.float()
    reserved = VOCABULARY + np.flatnonzero(~VOCAB.active_mask)
    mask = torch.zeros(logits.shape[-1], dtype=torch.bool)
    mask[torch.from_numpy(reserved)] = True
    logits = logits.masked_fill(mask, float("-inf"))[:, :-1]
    labels = batch.labels[:, 1:]
    expected = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100
    )
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    gradient = big.get_input_embeddings().weight.grad[VOCABULARY:]
    assert torch.allclose(lm.rows_in.grad, gradient, atol=1e-5)


def test_initializations():
    embedding = torch.randn(50, WIDTH)
    mean = mean_rows(embedding, 4)
    assert torch.allclose(mean, embedding.mean(0).expand(4, -1))
    draws = random_rows(embedding, 2000, seed=3)
    assert torch.equal(draws, random_rows(embedding, 2000, seed=3))
    assert torch.allclose(draws.mean(0), embedding.mean(0), atol=0.15)
    assert torch.allclose(draws.std(0), embedding.std(0), atol=0.15)
