"""SID rows written in place into matrices of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.bundle.delta import Rows
from gti_core.vocabulary import SidVocabulary
from service.engine.live_rows import LiveRows

FIRST, WIDTH = 7, 3
VOCABULARY = SidVocabulary((3, 4), (1, 2), FIRST)
REACHED = {0, 3, 4}


def update(numbers: list[int], seed: int, tied: bool) -> Rows:
    blocks = np.random.default_rng(seed).standard_normal((2, len(numbers), WIDTH))
    blocks = blocks.astype(np.float32)
    return Rows(np.array(numbers, np.int64), blocks[0], None if tied else blocks[1])


def matrices(tied: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    embedding = torch.arange(3 * 20, dtype=dtype).view(20, 3)
    return embedding, embedding if tied else -embedding


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 6), min_size=1), st.integers(0, 99)), max_size=6),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_last_write_counts_and_a_refused_one_changes_nothing(writes, tied, dtype):
    embedding, head = matrices(tied, dtype)
    expected_in, expected_out = embedding.clone(), head.clone()
    addresses = embedding.data_ptr(), head.data_ptr()
    live = LiveRows(embedding, head, VOCABULARY)
    live.reach(VOCABULARY)
    for numbers, seed in writes:
        rows = update(sorted(numbers), seed, tied)
        if numbers & REACHED:
            with pytest.raises(ValueError, match="reached"):
                live.write(rows)
            continue
        live.write(rows)
        ids = torch.from_numpy(rows.numbers) + FIRST
        expected_in[ids] = torch.from_numpy(rows.rows_in).to(dtype)
        out = rows.rows_in if rows.rows_out is None else rows.rows_out
        expected_out[ids] = torch.from_numpy(out).to(dtype)
    assert torch.equal(embedding, expected_in)
    assert torch.equal(head, expected_out)
    assert (embedding.data_ptr(), head.data_ptr()) == addresses


@pytest.mark.parametrize("tied", [True, False])
def test_a_reached_row_may_be_given_again_with_its_value(tied: bool) -> None:
    live = LiveRows(*matrices(tied, torch.bfloat16), VOCABULARY)
    rows = update([1, 5], 0, tied)
    live.write(rows)
    live.reach(VOCABULARY.activate(0).activate(1))
    live.write(rows)
    with pytest.raises(ValueError, match="reached"):
        live.write(update([1], 1, tied))


def test_a_changed_output_row_is_refused_before_the_input_row_is_written() -> None:
    embedding, head = matrices(False, torch.float32)
    live = LiveRows(embedding, head, VOCABULARY)
    live.reach(VOCABULARY)
    before = embedding.clone()
    same_in = embedding[FIRST : FIRST + 2].numpy().copy()
    same_in[1] += 1
    with pytest.raises(ValueError, match="reached"):
        live.write(Rows(np.array([0, 1]), same_in, np.ones((2, WIDTH), np.float32)))
    assert torch.equal(embedding, before)


def test_what_does_not_fit_the_model_is_refused() -> None:
    tied = LiveRows(*matrices(True, torch.float32), VOCABULARY)
    untied = LiveRows(*matrices(False, torch.float16), VOCABULARY)
    with pytest.raises(ValueError, match="no row 7 among 7"):
        tied.write(update([7], 0, True))
    with pytest.raises(ValueError, match="width 2"):
        tied.write(Rows(np.array([1]), np.ones((1, 2), np.float32)))
    with pytest.raises(ValueError, match="tied and takes no"):
        tied.write(update([1], 0, False))
    with pytest.raises(ValueError, match="untied and needs"):
        untied.write(update([1], 0, True))
    large = np.full((1, WIDTH), 1e6, np.float32)
    with pytest.raises(ValueError, match=r"beyond torch\.float16"):
        untied.write(Rows(np.array([1]), np.zeros_like(large), large))
    with pytest.raises(ValueError, match="end at 14"):
        LiveRows(torch.zeros(13, WIDTH), torch.zeros(13, WIDTH), VOCABULARY)
