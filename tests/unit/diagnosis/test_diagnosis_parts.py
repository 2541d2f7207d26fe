"""Samples, figures of an arm from plain arrays, and the names of arms."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.diagnosis.collect import Arm, ArmFigures, Diagnosis
from gti_core.diagnosis.figures import (
    AFTER,
    BEFORE,
    TIED,
    Block,
    centred,
    rsa_figures,
    shared_map,
    side_figures,
)
from gti_core.diagnosis.report import FIGURES
from gti_core.diagnosis.sample import Sample, choose, choose_codes, frequent_words, spread
from gti_core.errors import PipelineError
from gti_core.grounding.diagnostics import Rsa
from gti_core.testing import VOCABULARY, tiny_tokenizer
from gti_core.vocabulary import SidVocabulary

VOCAB = SidVocabulary((4, 9), (4, 6), VOCABULARY)
SAMPLE = Sample((1, 2), ("a", "b"), ((0, 0), (0, 3), (1, 1), (1, 5)), ("red", "cup"), (3, 4))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_codes_are_drawn_evenly_and_in_order():
    codes = choose_codes((4, 100, 100), 50, random.Random(0))
    assert [sum(level == wanted for level, _ in codes) for wanted in range(3)] == [4, 23, 23]
    assert list(codes) == sorted(set(codes))
    assert len(choose_codes((2, 3), 50, random.Random(0))) == 5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 60), st.integers())
def test_codes_are_active_and_as_many_as_asked(active, count, seed):
    codes = choose_codes(active, count, random.Random(seed))
    assert len(set(codes)) == min(count, sum(active))
    assert all(0 <= code < active[level] for level, code in codes)


def test_words_are_counted_without_case_and_function_words_are_left_out():
    titles = ["The Red cup", "red CUP and red lamp", "a b1 2001"]
    assert frequent_words(titles) == ["red", "CUP", "lamp"]


def test_a_sample_depends_on_its_arguments_alone():
    tokenizer = tiny_tokenizer()
    titles = [f"red cup {number}" for number in range(9)] + ["blue <|im_start|> lamp\x00"]
    sample = choose(tokenizer, titles, VOCAB, 3)
    assert sample == choose(tokenizer, list(titles), VOCAB, 3)
    occurring = {
        token for title in titles for token in tokenizer(title, split_special_tokens=True).input_ids
    }
    assert set(sample.text_ids) <= occurring
    assert not set(sample.text_ids) & set(tokenizer.all_special_ids)
    assert list(sample.text_ids) == sorted(set(sample.text_ids))
    assert sample.words[:2] == ("cup", "red")
    assert tokenizer.convert_ids_to_tokens(sample.word_ids[0]) == "cup"
    assert len(sample.codes) == 10
    small = choose(tokenizer, titles, SidVocabulary((90,), (90,), VOCABULARY), 4)
    assert (
        small.codes != choose(tokenizer, titles, SidVocabulary((90,), (90,), VOCABULARY), 5).codes
    )


def test_a_catalogue_without_titles_gives_codes_only():
    sample = choose(tiny_tokenizer(), ["", "  "], VOCAB, 0)
    assert (sample.text_ids, sample.words) == ((), ())
    assert len(sample.codes) == 10


def test_spread_covers_both_ends():
    assert spread(5, 9).tolist() == [0, 1, 2, 3, 4]
    assert spread(101, 3).tolist() == [0, 50, 100]


def test_rsa_compares_each_level_with_its_own_codebook():
    books = [normal(1, 4, 3), normal(2, 6, 3)]
    figures = rsa_figures(np.concatenate([books[0], -books[1]]), books)
    assert [level.pearson for level in figures.levels] == pytest.approx([1.0, 1.0])
    assert figures.mean.spearman == pytest.approx(1.0)
    assert figures.all.pearson < 0.99, "a level turned around keeps its own geometry only"
    assert rsa_figures(np.concatenate(books), books).all.pearson == pytest.approx(1.0)


def test_the_mean_is_over_levels_where_rsa_is_defined():
    books = [normal(1, 4, 3), normal(2, 6, 3)]
    rows = np.concatenate([np.ones((4, 3), dtype=np.float32), books[1]])
    figures = rsa_figures(rows, books)
    assert figures.levels[0] == Rsa(None, None)
    assert figures.mean.pearson == pytest.approx(1.0)
    assert rsa_figures(np.ones((10, 3), dtype=np.float32), books).mean == Rsa(None, None)


def test_large_levels_are_compared_on_a_part_of_their_codes(monkeypatch):
    monkeypatch.setattr("gti_core.diagnosis.figures.MAX_PAIRED", 5)
    books = [normal(1, 40, 3)]
    rows = normal(2, 40, 3)
    rows[spread(40, 5)] = books[0][spread(40, 5)]
    assert rsa_figures(rows, books).mean.pearson == pytest.approx(1.0)


def test_centred_rows_lose_their_mean_and_collapsed_rows_vanish():
    assert centred(np.array([[1, 4], [3, 0]], np.float32)).tolist() == [[-1, 2], [1, -2]]
    row = normal(7, 1, 50)
    assert not centred(np.repeat(row, 33, axis=0)).any()
    assert not centred(row + 1e-8 * normal(8, 33, 50).astype(float)).any(), "rounding only"
    assert centred(row + 1e-4 * normal(8, 33, 50)).any()
    assert centred(np.zeros((0, 4), np.float32)).shape == (0, 4)


def test_a_map_is_shared_by_its_blocks_and_ignores_length():
    block = normal(1, 20, 5)
    (first, second), explained = shared_map([block, 7 * block])
    assert first == pytest.approx(second, abs=1e-6)
    assert 1 >= explained[0] >= explained[1] > 0
    (same,), explained = shared_map([np.ones((5, 3), np.float32)])
    assert not same.any()
    assert explained == (0.0, 0.0)


def test_figures_of_a_side_pick_the_sampled_codes():
    books = [normal(1, 4, 3), normal(2, 6, 3)]
    rows = np.concatenate(books)
    text, words = normal(3, 2, 3), normal(4, 2, 3)
    side = side_figures(
        [
            Block(BEFORE, TIED, np.ones_like(rows), text, words),
            Block(AFTER, TIED, rows, text, words),
        ],
        books,
        SAMPLE,
    )
    before, after = side.snapshots
    shown = np.stack([*text, books[0][0], books[0][3], books[1][1], books[1][5]]).astype(float)
    shown /= np.linalg.norm(shown, axis=1, keepdims=True)
    assert after.cosine == pytest.approx(shown @ shown.T)
    assert after.rsa.mean.pearson == pytest.approx(1.0)
    assert before.effective_rank == pytest.approx(1.0)
    assert before.mean_cosine == pytest.approx(1.0)
    assert before.rsa.mean == Rsa(None, None)
    assert before.centred_cosine[2:, 2:].tolist() == np.eye(4).tolist()
    assert np.ptp(before.sid_points, axis=0) == pytest.approx([0, 0])
    assert before.word_points == pytest.approx(after.word_points)
    assert side.point_levels.tolist() == [0] * 4 + [1] * 6


def test_an_arm_is_named():
    assert Arm.parse("mean init=runs/a=b") == Arm("mean init", Path("runs/a=b"))
    for text in ("runs/a", "=runs/a", "a=", "x" * 61 + "=a", "a\nb=c", "a\u202eb=c"):
        with pytest.raises(PipelineError):
            Arm.parse(text)


def test_one_level_of_one_code_and_no_titles_can_be_drawn():
    sample = Sample((), (), ((0, 0),), (), ())
    empty = np.zeros((0, 3), np.float32)
    side = side_figures(
        [Block(BEFORE, TIED, normal(1, 1, 3), empty, empty)], [normal(2, 1, 3)], sample
    )
    assert side.snapshots[0].rsa.mean == Rsa(None, None)
    arm = ArmFigures("x", "ground", "0", "tiny", (1,), sample, (side,))
    for draw in FIGURES.values():
        assert draw(Diagnosis(0, (arm,))).startswith(b"\x89PNG")
