"""Rows fitted to text vectors: exact on additive data, at the text rows' scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.errors import DataError
from gti_core.grounding.diagnostics import effective_rank
from gti_core.grounding.initialize import text_mean_rows
from gti_core.grounding.regression import regression_rows, text_vectors
from gti_core.lm import encode_text
from gti_core.testing import FAMILIES, tiny_model, tiny_tokenizer
from gti_core.vocabulary import SidVocabulary

TEXT_ROWS = torch.randn(50, 6, generator=torch.Generator().manual_seed(1)) * 0.3 + 2.0


def grid(sizes: tuple[int, ...]) -> np.ndarray:
    """Every SID once."""
    return np.stack([axis.ravel() for axis in np.indices(sizes)], axis=1).astype(np.int32)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from([(3, 4), (2, 3, 2)]))
def test_additive_texts_are_recovered_up_to_each_levels_scale(seed, sizes):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = SidVocabulary(sizes, sizes, 50)
    parts = torch.randn(vocabulary.rows, 6, generator=generator)
    for offset, size in zip(vocabulary.offsets, sizes, strict=True):
        parts[offset : offset + size] -= parts[offset : offset + size].mean(dim=0)
    sids = grid(sizes)
    rows = torch.as_tensor(sids.astype(np.int64)) + torch.tensor(vocabulary.offsets)
    vectors = parts[rows].sum(dim=1) + 7.0
    fitted = regression_rows(vectors, sids, vocabulary, TEXT_ROWS, ridge=1e-9)
    delta = fitted - TEXT_ROWS.mean(dim=0)
    spread = (TEXT_ROWS - TEXT_ROWS.mean(dim=0)).pow(2).mean().sqrt()
    for offset, size in zip(vocabulary.offsets, sizes, strict=True):
        block, truth = delta[offset : offset + size], parts[offset : offset + size]
        assert torch.allclose(block.pow(2).mean().sqrt(), spread, rtol=1e-4)
        scale = spread / truth.pow(2).mean().sqrt()
        assert torch.allclose(block, truth * scale, atol=1e-3)


def test_unused_and_reserved_rows_stay_at_the_mean():
    vocabulary = SidVocabulary((3, 4), (3, 2), 50)
    sids = np.array([[0, 0], [1, 1], [0, 1]], dtype=np.int32)
    vectors = torch.tensor([[1.0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]])
    fitted = regression_rows(vectors, sids, vocabulary, TEXT_ROWS)
    mean = TEXT_ROWS.mean(dim=0)
    for row in (2, 5, 6):
        assert torch.allclose(fitted[row], mean)
    assert not torch.allclose(fitted[0], fitted[1])


def test_equal_texts_leave_every_row_at_the_mean():
    vocabulary = SidVocabulary((2, 2), (2, 2), 50)
    fitted = regression_rows(torch.ones(4, 6), grid((2, 2)), vocabulary, TEXT_ROWS)
    assert torch.allclose(fitted, TEXT_ROWS.mean(dim=0).expand(4, 6))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.floats(0.1, 0.9))
def test_whitening_evens_the_spectrum_out_and_changes_nothing_else(seed, power):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = SidVocabulary((3, 5), (3, 4), 50)
    sids = grid((3, 4))[:11]
    vectors = torch.randn(11, 6, generator=generator) * torch.tensor([9.0, 3, 1, 0.5, 0.2, 0.1])
    mean = TEXT_ROWS.mean(dim=0)
    plain = regression_rows(vectors, sids, vocabulary, TEXT_ROWS) - mean
    white = regression_rows(vectors, sids, vocabulary, TEXT_ROWS, whitening=power) - mean
    before, after = torch.linalg.svdvals(plain.double()), torch.linalg.svdvals(white.double())
    kept = before > before[0] * 1e-5
    expected = before[kept] ** (1 - power)
    assert torch.allclose(after[kept] / after[0], expected / expected[0], rtol=1e-3)
    assert torch.allclose(white.norm(), plain.norm(), rtol=1e-4)
    assert effective_rank(white) > effective_rank(plain)
    # Directions stay: the same subspace, and the row that no item uses at the mean.
    assert torch.allclose(white[-1], torch.zeros(6), atol=1e-5)
    inside = torch.linalg.pinv(plain.double(), rtol=1e-5) @ plain.double()
    assert torch.allclose(white.double() @ inside, white.double(), atol=1e-4)


def test_whitening_leaves_collapsed_rows_alone():
    vocabulary = SidVocabulary((2, 2), (2, 2), 50)
    fitted = regression_rows(torch.ones(4, 6), grid((2, 2)), vocabulary, TEXT_ROWS, whitening=0.75)
    assert torch.allclose(fitted, TEXT_ROWS.mean(dim=0).expand(4, 6))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_vectors_do_not_depend_on_the_batch(family):
    model, tokenizer = tiny_model(family), tiny_tokenizer()
    texts = ["red cup", "a", "large old chair in a road", "blue"]
    ids = [encode_text(tokenizer, text) for text in texts]
    together = text_vectors(model, ids, batch_size=4)
    alone = text_vectors(model, ids, batch_size=1)
    assert torch.allclose(together, alone, atol=1e-5)
    hidden = model.base_model(input_ids=torch.tensor([ids[0]])).last_hidden_state[0]
    assert torch.allclose(together[0], hidden.mean(dim=0), atol=1e-5)


def test_a_text_without_tokens_is_refused():
    with pytest.raises(DataError, match="no tokens"):
        text_vectors(tiny_model("llama"), [[1], []])


def test_text_mean_rows_by_hand():
    embedding = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 4.0], [6.0, 6.0]])
    rows = text_mean_rows(embedding, [[1, 2], [3], []], [[0, 2], [0, 3], [1, 3]], 5)
    mean = embedding.mean(dim=0)
    first = torch.tensor([1.0, 2.0])
    assert torch.allclose(rows[0], (first + torch.tensor([6.0, 6.0])) / 2)
    assert torch.allclose(rows[1], mean)
    assert torch.allclose(rows[2], first)
    assert torch.allclose(rows[3], (torch.tensor([6.0, 6.0]) + mean) / 2)
    assert torch.allclose(rows[4], mean)
