"""Residual quantization: worked by hand, against the plain oracle, and the k-means fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

from gti_core.errors import DataError
from gti_core.quantizer.base import Quantizer, from_tensors, quantize_oracle
from gti_core.quantizer.kmeans import ResidualKMeans, fit_residual_kmeans
from gti_core.types import FloatArray


def array(rows: list[list[float]]) -> FloatArray:
    return np.array(rows, dtype=np.float32)


@pytest.fixture
def tiny() -> ResidualKMeans:
    return ResidualKMeans(
        [array([[0, 0], [10, 0]]), array([[1, 1], [-1, 1], [0, -2]])],
    )


def test_worked_example(tiny: ResidualKMeans) -> None:
    # (8, 2): code 1, residual (-2, 2): nearest (-1, 1).  (1, 0): code 0, residual (1, 0): (1, 1).
    # (10, -9): code 1, residual (0, -9): (0, -2).  (5, 0) ties at level 0: lowest code, then
    # residual (5, 0): (1, 1) at 17, (-1, 1) at 37, (0, -2) at 29.
    codes = tiny.quantize(array([[8, 2], [1, 0], [10, -9], [5, 0]]))
    assert codes.tolist() == [[1, 1], [0, 0], [1, 2], [0, 0]]
    assert codes.dtype == np.int32
    assert tiny.sizes == (2, 3)
    assert tiny.sums(codes).tolist() == [[9, 1], [1, 1], [10, -2], [1, 1]]
    assert tiny.sums(codes[:, :1]).tolist() == [[10, 0], [0, 0], [10, 0], [0, 0]]
    assert tiny.reconstruct(codes).tolist() == [[9, 1], [1, 1], [10, -2], [1, 1]]


INTEGERS = st.integers(-8, 8).map(float)


@st.composite
def quantizers_and_points(draw: st.DrawFn) -> tuple[ResidualKMeans, FloatArray]:
    """Small integer coordinates: distances are exact, so that ties are real ties."""
    width = draw(st.integers(1, 3))

    def rows(most: int) -> FloatArray:
        shape = (draw(st.integers(1, most)), width)
        return draw(hnp.arrays(np.float32, shape, elements=INTEGERS))

    books = [rows(5) for _ in range(draw(st.integers(1, 4)))]
    return ResidualKMeans(books), rows(8)


@given(quantizers_and_points())
def test_quantize_equals_the_oracle(case: tuple[ResidualKMeans, FloatArray]) -> None:
    quantizer, points = case
    expected = quantize_oracle(points.tolist(), [book.tolist() for book in quantizer.codebooks])
    assert quantizer.quantize(points).tolist() == expected


@given(quantizers_and_points())
def test_tensors_survive_safetensors(case: tuple[ResidualKMeans, FloatArray]) -> None:
    quantizer, points = case
    stored = load(save(quantizer.to_tensors()))
    again = from_tensors(quantizer.kind, stored, quantizer.config())
    assert again.sizes == quantizer.sizes
    np.testing.assert_array_equal(again.quantize(points), quantizer.quantize(points))


def test_bad_input_is_refused(tiny: ResidualKMeans) -> None:
    for vectors, message in [
        (array([[1, 2, 3]]), "3 wide, the quantizer takes 2"),
        (array([[1, np.nan]]), "not finite"),
        (np.zeros(2, dtype=np.float32), "shape"),
        (np.zeros((0, 2), dtype=np.float32), "shape"),
    ]:
        with pytest.raises(DataError, match=message):
            tiny.quantize(vectors)
    with pytest.raises(DataError, match="at least one level"):
        ResidualKMeans([])
    with pytest.raises(DataError, match="wide"):
        ResidualKMeans([array([[1, 2]]), array([[1]])])


def test_bad_storage_is_refused(tiny: ResidualKMeans) -> None:
    with pytest.raises(DataError, match="unknown quantizer kind 'pq'"):
        from_tensors("pq", tiny.to_tensors(), {})
    with pytest.raises(DataError, match=r"codebook\.0"):
        from_tensors(tiny.kind, {}, {})
    with pytest.raises(DataError, match="sizes"):
        from_tensors(tiny.kind, tiny.to_tensors(), {"sizes": [2, 4]})


def clusters(seed: int = 0) -> FloatArray:
    """80 points: 4 far centres times 4 small offsets, 5 points each, slight noise."""
    rng = np.random.default_rng(seed)
    centres = np.array([[0, 0], [100, 0], [0, 100], [100, 100]], dtype=np.float32)
    offsets = np.array([[5, 0], [-5, 0], [0, 5], [0, -5]], dtype=np.float32)
    points = (centres[:, None] + offsets[None]).reshape(-1, 2).repeat(5, axis=0)
    return (points + rng.normal(0, 0.1, points.shape)).astype(np.float32)


def test_fit_finds_the_hierarchy() -> None:
    points = clusters()
    quantizer = fit_residual_kmeans(points, (4, 4), seed=0)
    codes = quantizer.quantize(points)
    groups = [
        {tuple(row) for row in codes[start : start + 5].tolist()} for start in range(0, 80, 5)
    ]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == 16
    assert np.abs(quantizer.reconstruct(codes) - points).max() < 0.7


def test_fit_is_deterministic_and_reports_progress() -> None:
    calls: list[tuple[int, int]] = []
    first = fit_residual_kmeans(
        clusters(), (4, 3, 2), seed=3, progress=lambda *call: calls.append(call)
    )
    again = fit_residual_kmeans(clusters(), (4, 3, 2), seed=3)
    other = fit_residual_kmeans(clusters(), (4, 3, 2), seed=4)
    assert calls == [(1, 3), (2, 3), (3, 3)]
    for left, right in zip(first.codebooks, again.codebooks, strict=True):
        np.testing.assert_array_equal(left, right)
    assert any(
        (left != right).any() for left, right in zip(first.codebooks, other.codebooks, strict=True)
    )


def test_each_level_lowers_the_error() -> None:
    points = clusters()

    def error(quantizer: Quantizer) -> float:
        return float(((quantizer.reconstruct(quantizer.quantize(points)) - points) ** 2).sum())

    errors = [error(fit_residual_kmeans(points, (3,) * levels, seed=0)) for levels in (1, 2, 3)]
    assert errors[0] > errors[1] > errors[2]


def test_fewer_distinct_vectors_than_codes_are_kept_exactly() -> None:
    points = array([[1, 2], [3, 4], [1, 2]])
    quantizer = fit_residual_kmeans(points, (4, 2), seed=0)
    codes = quantizer.quantize(points)
    assert quantizer.sizes == (4, 2)
    np.testing.assert_array_equal(quantizer.reconstruct(codes), points)
    assert codes[0].tolist() == codes[2].tolist() != codes[1].tolist()


@pytest.mark.parametrize("sizes", [(), (4, 0), (-1,)])
def test_bad_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="positive number per level"):
        fit_residual_kmeans(clusters(), sizes, seed=0)
