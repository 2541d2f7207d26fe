"""Spectrum, cosines and RSA: numbers worked out by hand, and what must not change them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.errors import DataError
from gti_core.grounding.diagnostics import Rsa, cosine_matrix, effective_rank, rsa, spectrum


def random_rows(seed: int, count: int = 12, width: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width))


def rotation(seed: int, width: int) -> np.ndarray:
    return np.linalg.qr(random_rows(seed, width, width))[0]


def plane(*degrees: float) -> np.ndarray:
    """Unit vectors at these angles."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def test_cosines_by_hand():
    rows = torch.tensor([[2.0, 0.0], [3.0, 3.0], [0.0, -5.0], [0.0, 0.0]])
    half = math.sqrt(0.5)
    expected = [[1, half, 0, 0], [half, 1, -half, 0], [0, -half, 1, 0], [0, 0, 0, 1]]
    assert cosine_matrix(rows).numpy() == pytest.approx(np.array(expected))


def test_spectrum_by_hand():
    assert spectrum(torch.diag(torch.tensor([1.0, 4.0, 2.0]))).tolist() == [1.0, 0.5, 0.25]
    assert spectrum(np.ones((3, 2))).tolist() == pytest.approx([1.0, 0.0], abs=1e-12)
    assert spectrum(np.zeros((3, 2))).tolist() == [0.0, 0.0]


def test_effective_rank_of_two_unequal_directions():
    # Shares 3/4 and 1/4: entropy ln 4 - 3/4 ln 3.
    expected = math.exp(math.log(4) - 0.75 * math.log(3))
    assert effective_rank(np.diag([3.0, 1.0])) == pytest.approx(expected)


def test_rsa_by_hand():
    # Pairs (1,2), (1,3), (2,3): cosines 0, 1/2, sqrt(3)/2 of the rows (0, 90, 60 degrees)
    # against 1/2, 0, sqrt(3)/2 of the codewords (0, 60, 90).
    result = rsa(plane(0, 90, 60), plane(0, 60, 90))
    x, y = np.array([0, 0.5, math.sqrt(0.75)]), np.array([0.5, 0, math.sqrt(0.75)])
    expected = (x - x.mean()) @ (y - y.mean()) / ((x - x.mean()) @ (x - x.mean()))
    assert result.pearson == pytest.approx(expected, abs=1e-5)
    # Ranks 1 2 3 against 2 1 3: 1 - 6 * (1 + 1 + 0) / (3 * 8) = 1/2.
    assert result.spearman == pytest.approx(0.5)


def test_rsa_of_an_opposite_geometry_is_negative():
    assert rsa(plane(0, 10, 90), plane(0, 90, 10)).spearman < 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-3, 1e3))
def test_rsa_of_a_rotated_and_scaled_geometry_is_one(seed, scale):
    words = random_rows(seed)
    lengths = np.random.default_rng(seed + 1).uniform(0.1, 10, size=(len(words), 1))
    result = rsa(scale * lengths * (words @ rotation(seed + 2, words.shape[1])), words)
    assert result.pearson == pytest.approx(1.0, abs=1e-6)
    assert result.spearman == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_rsa_is_symmetric_and_bounded_and_takes_float32_torch_rows(seed):
    rows, words = random_rows(seed, width=4), random_rows(seed + 1)
    there, back = rsa(rows, words), rsa(words, rows)
    assert -1 <= there.pearson <= 1
    assert there.pearson == pytest.approx(back.pearson)
    assert there.spearman == pytest.approx(back.spearman)
    single = rsa(torch.from_numpy(rows).float(), words.astype(np.float32))
    assert single.pearson == pytest.approx(there.pearson, abs=1e-4)


def test_equal_angles_stay_equal_after_rotation():
    """Two orthogonal pairs of near vectors: rounding must not rank the pairs that tie."""
    words = np.kron(np.eye(4), np.ones((3, 2)))
    words[::3, ::2] += 0.5
    rotated = (words @ rotation(5, words.shape[1])).astype(np.float32)
    assert rsa(rotated, words).spearman == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "rows",
    [
        np.tile(random_rows(3, 1), (12, 1)),
        np.tile(random_rows(3, 1), (12, 1)) * np.arange(1, 13)[:, None],
        np.tile(random_rows(3, 1), (12, 1)) + 1e-9 * random_rows(4),
        np.zeros((12, 6)),
        np.eye(12),
    ],
    ids=["mean initialization", "one line", "rounding only", "zeros", "all orthogonal"],
)
def test_rsa_without_differing_angles_is_undefined_on_either_side(rows):
    words = random_rows(1)
    assert rsa(rows.astype(np.float32), words) == Rsa(None, None)
    assert rsa(words, rows.astype(np.float32)) == Rsa(None, None)


def test_rsa_of_fewer_than_three_rows_is_undefined():
    assert rsa(random_rows(1, 2), random_rows(2, 2)) == Rsa(None, None)
    assert rsa(random_rows(1, 3), random_rows(1, 3)).pearson == pytest.approx(1.0)


def test_rows_that_can_not_be_compared_are_refused():
    with pytest.raises(DataError, match="3 rows, but 4 codebook vectors"):
        rsa(random_rows(1, 3), random_rows(1, 4))
    broken = random_rows(1)
    broken[2, 2] = np.nan
    for figure in (effective_rank, spectrum, cosine_matrix):
        with pytest.raises(DataError, match="not finite"):
            figure(broken)
    with pytest.raises(DataError, match=r"shape \[S, D\]"):
        cosine_matrix(np.ones(3))
