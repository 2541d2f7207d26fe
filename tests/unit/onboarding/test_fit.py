"""Rows fitted on cached states: convex, bounded by a ridge, and what is wanted comes about."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from gti_core.errors import PipelineError
from gti_core.onboarding.fit import Evidence, fit_rows
from gti_core.types import FloatArray


def evidence(seed: int, states: int, rows: int, width: int) -> tuple[FloatArray, Evidence]:
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((states, width)).astype(np.float32)
    wanted = rng.dirichlet(np.ones(rows + 1), states)[:, :rows].astype(np.float32)
    norms = rng.standard_normal(states).astype(np.float32)
    weights = rng.random(states).astype(np.float32)
    start = rng.standard_normal((rows, width)).astype(np.float32)
    return start, Evidence(hidden, norms, wanted, weights)


def loss_oracle(flat: FloatArray, start: FloatArray, data: Evidence, ridge: float) -> float:
    rows = flat.reshape(start.shape)
    scale = float(np.mean([float(state @ state) for state in data.hidden]))
    total = 0.0
    for state, norm, wanted, weight in zip(
        data.hidden, data.log_norm, data.wanted, data.weights, strict=True
    ):
        logits = [float(row @ state) for row in rows]
        log_z = np.logaddexp.reduce([float(norm), *logits])
        kept = (1 - wanted.sum()) * (norm - log_z)
        new = sum(w * (logit - log_z) for w, logit in zip(wanted, logits, strict=True))
        total -= weight * (kept + new)
    return float(total + 0.5 * ridge * scale * ((rows - start) ** 2).sum())


@given(st.integers(0, 1000), st.integers(1, 3), st.sampled_from([0.01, 0.3, 3.0]))
@settings(max_examples=10, deadline=None)
def test_the_fit_is_the_minimum_that_an_independent_solver_finds(
    seed: int, rows: int, ridge: float
) -> None:
    start, data = evidence(seed, 12, rows, 4)
    found = fit_rows(start, data, ridge=ridge)
    best = minimize(loss_oracle, start.ravel(), args=(start, data, ridge), tol=1e-9)
    assert loss_oracle(found.ravel(), start, data, ridge) <= best.fun + 1e-3


def test_a_row_gets_what_is_wanted_and_no_more_elsewhere() -> None:
    rng = np.random.default_rng(0)
    hidden = 0.3 * rng.standard_normal((240, 32)).astype(np.float32)
    hidden[:40, :16] += 2
    hidden[40:, 16:] += 2
    wanted = np.zeros((240, 1), dtype=np.float32)
    wanted[:40] = 0.5
    data = Evidence(hidden, np.zeros(240, np.float32), wanted, np.ones(240, np.float32))
    row = fit_rows(np.zeros((1, 32), np.float32), data, ridge=0.01)[0]
    share = 1 / (1 + np.exp(-hidden @ row))
    assert share[:40].mean() == pytest.approx(0.5, abs=0.05)
    assert share[40:].max() < 0.05


def test_a_heavy_ridge_keeps_the_start() -> None:
    start, data = evidence(3, 20, 2, 8)
    np.testing.assert_allclose(fit_rows(start, data, ridge=1e6), start, atol=1e-3)


def test_without_evidence_the_start_stays() -> None:
    start = np.ones((2, 3), np.float32)
    nothing = Evidence(
        np.empty((0, 3), np.float32),
        np.empty(0, np.float32),
        np.empty((0, 2), np.float32),
        np.empty(0, np.float32),
    )
    np.testing.assert_array_equal(fit_rows(start, nothing), start)


def test_more_than_everything_can_not_be_wanted() -> None:
    ones = np.ones(2, np.float32)
    with pytest.raises(PipelineError):
        Evidence(np.ones((2, 3), np.float32), ones, np.full((2, 2), 0.6, np.float32), ones)
    with pytest.raises(PipelineError):
        Evidence(np.ones((2, 3), np.float32), ones[:1], np.zeros((2, 2), np.float32), ones)
