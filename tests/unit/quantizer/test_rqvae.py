"""RQ-VAE: the numpy side, Sinkhorn, and training on a small synthetic set."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from gti_core.errors import DataError
from gti_core.quantizer.assign import assign_unique, quantization_report
from gti_core.quantizer.base import from_tensors, quantize_oracle
from gti_core.quantizer.rqvae import Linear, RqVae, apply_mlp
from gti_core.quantizer.rqvae_training import RqVaeConfig, SinkhornSampler, fit_rqvae, sinkhorn
from gti_core.types import FloatArray

SMALL = RqVaeConfig(
    hidden=(32, 16), code_dim=8, epochs=60, batch_size=64, learning_rate=5e-3, dropout=0.0
)


def array(rows: list[list[float]]) -> FloatArray:
    return np.array(rows, dtype=np.float32)


def vector(values: list[float]) -> FloatArray:
    return np.array(values, dtype=np.float32)


def synthetic(seed: int = 0) -> FloatArray:
    """200 unit vectors of width 24: 6 coarse directions, each with 4 finer ones, and noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(6, 24))
    fine = 0.4 * rng.normal(size=(4, 24))
    rows = coarse[rng.integers(6, size=200)] + fine[rng.integers(4, size=200)]
    rows += 0.05 * rng.normal(size=rows.shape)
    unit: FloatArray = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


def error(quantizer: RqVae, vectors: FloatArray) -> float:
    """Relative reconstruction error; there are more vectors than SIDs, so none is assigned."""
    report = quantization_report(quantizer, vectors, quantizer.quantize(vectors))
    return float(report["reconstruction_error"])


@pytest.fixture(scope="module")
def trained() -> RqVae:
    return fit_rqvae(synthetic(), (8, 8), seed=0, config=SMALL)


def test_mlp_worked_by_hand() -> None:
    layers = [
        Linear(array([[1, 0], [0, -1]]), vector([0, 1])),
        Linear(array([[2, 3]]), vector([-1])),
    ]
    # (1, 2): hidden (1, -1) -> ReLU (1, 0) -> 2 - 1 = 1.  (-1, -2): (-1, 3) -> (0, 3) -> 8.
    assert apply_mlp(layers, array([[1, 2], [-1, -2]])).tolist() == [[1], [8]]


def test_quantizer_worked_by_hand() -> None:
    quantizer = RqVae(
        [array([[0], [4]]), array([[1], [-1]])],
        [Linear(array([[1, 1]]), vector([0]))],
        [Linear(array([[1], [2]]), vector([0, 0]))],
        vector([1, 1]),
        2.0,
    )
    # ((7, 5) - 1) / 2 = (3, 2) -> 5: code 1 (4), residual 1: code 0.  5 -> (5, 10) * 2 + 1.
    assert quantizer.embed(array([[7, 5]])).tolist() == [[5]]
    codes = quantizer.quantize(array([[7, 5]]))
    assert codes.tolist() == [[1, 0]]
    assert quantizer.reconstruct(codes).tolist() == [[11, 21]]


def test_contradicting_shapes_are_refused() -> None:
    book = [array([[0.0]])]
    into, out = Linear(array([[1, 1]]), vector([0])), Linear(array([[1], [2]]), vector([0, 0]))
    mean = vector([0, 0])
    with pytest.raises(DataError, match="encoder layer 0"):
        RqVae(book, [out], [out], mean, 1.0)
    with pytest.raises(DataError, match="decoder ends with width 1, not 2"):
        RqVae(book, [into], [], mean, 1.0)
    with pytest.raises(DataError, match=r"scale 0\.0"):
        RqVae(book, [into], [out], mean, 0.0)


def test_sinkhorn_spreads_a_batch_evenly() -> None:
    # Eight rows that all prefer code 0, by different margins.
    scores = torch.zeros(8, 4)
    scores[:, 0] = torch.linspace(1.0, 2.0, 8)
    plan = sinkhorn(scores, 0.05, 200)
    torch.testing.assert_close(plan.sum(1), torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(
        plan.sum(0), torch.full((4,), 2.0, dtype=torch.float64), atol=0.02, rtol=0
    )
    # The two with the largest margins keep code 0.
    assert (plan[:, 0] > 0.5).tolist() == [False] * 6 + [True] * 2


def test_sinkhorn_survives_equal_scores_and_tiny_temperature() -> None:
    assert sinkhorn(torch.zeros(4, 2), 0.05, 5).tolist() == [[0.5, 0.5]] * 4
    plan = sinkhorn(torch.tensor([[0.0, -900.0], [-900.0, 0.0]]), 1e-4, 5)
    torch.testing.assert_close(plan, torch.eye(2, dtype=torch.float64))


def test_sampler_balances_only_while_training() -> None:
    distances = torch.tensor([[[-1.0, -2.0], [-1.0, -9.0]]])
    sampler = SinkhornSampler(0.05, 50)
    codes, one_hot = sampler(distances, training=True)
    assert codes.tolist() == [[1, 0]]
    assert one_hot.tolist() == [[[0, 1], [1, 0]]]
    assert sampler(distances, training=False)[0].tolist() == [[0, 0]]


def test_two_levels_reconstruct_better_than_one(trained: RqVae) -> None:
    vectors = synthetic()
    one = fit_rqvae(vectors, (8,), seed=0, config=SMALL)
    both, single = error(trained, vectors), error(one, vectors)
    assert both < 0.8 * single
    assert single < 0.5
    assert trained.sizes == (8, 8)
    assert trained.width == 8


def test_levels_are_well_used(trained: RqVae) -> None:
    vectors = synthetic()
    report = quantization_report(trained, vectors, trained.quantize(vectors))
    assert min(report["utilization"]) >= 0.75


def test_quantize_equals_the_oracle(trained: RqVae) -> None:
    vectors = synthetic(1)[:20]
    books = [book.tolist() for book in trained.codebooks]
    expected = quantize_oracle(trained.embed(vectors).tolist(), books)
    assert trained.quantize(vectors).tolist() == expected


def test_training_is_repeatable_and_leaves_the_global_seed_alone() -> None:
    config = RqVaeConfig(hidden=(16,), code_dim=4, epochs=3, batch_size=64)
    calls: list[tuple[int, int]] = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = fit_rqvae(
        synthetic(), (4, 4), seed=1, config=config, progress=lambda *call: calls.append(call)
    )
    assert torch.equal(torch.rand(3), expected)
    again = fit_rqvae(synthetic(), (4, 4), seed=1, config=config)
    other = fit_rqvae(synthetic(), (4, 4), seed=2, config=config)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    for name, tensor in first.to_tensors().items():
        np.testing.assert_array_equal(tensor, again.to_tensors()[name])
    assert (first.encoder[0].weight != other.encoder[0].weight).any()


def test_tensors_survive_safetensors(trained: RqVae) -> None:
    stored = load(save(trained.to_tensors()))
    again = from_tensors("rq-vae", stored, trained.config())
    vectors = synthetic(2)
    np.testing.assert_array_equal(again.quantize(vectors), trained.quantize(vectors))
    codes = trained.quantize(vectors)
    np.testing.assert_array_equal(again.reconstruct(codes), trained.reconstruct(codes))


def test_bad_storage_is_refused(trained: RqVae) -> None:
    tensors = trained.to_tensors()
    with pytest.raises(DataError, match="contradicts its tensors"):
        from_tensors("rq-vae", tensors, {"sizes": [8, 9]})
    for missing in ("mean", "encoder.1.bias", "codebook.0"):
        partial = {name: tensor for name, tensor in tensors.items() if name != missing}
        with pytest.raises(DataError):
            from_tensors("rq-vae", partial, {})


def test_unique_assignment_works_on_it(trained: RqVae) -> None:
    vectors = synthetic()[:60]
    assigned = assign_unique(trained, vectors)
    assert len({tuple(row) for row in assigned.tolist()}) == 60


def test_too_few_vectors_and_bad_settings_are_refused() -> None:
    with pytest.raises(DataError, match="needs as many vectors, got 5"):
        fit_rqvae(synthetic()[:5], (4, 8), seed=0)
    with pytest.raises(DataError, match="must be positive"):
        RqVaeConfig(epochs=0)
    with pytest.raises(DataError, match="sinkhorn_epsilon"):
        RqVaeConfig(sinkhorn_epsilon=0.0)
