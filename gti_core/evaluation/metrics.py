"""Metrics for one target per case (leave-one-out), per user first, averaged last.

With the target at rank r (1-based) of the list:

- Recall@k = 1 if r <= k, else 0 (also called hit rate: there is one target);
- NDCG@k = 1 / log2(r + 1) if r <= k, else 0 (the ideal list has it at rank 1, whose gain is 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from gti_core.errors import DataError
from gti_core.types import LongArray

Values: TypeAlias = npt.NDArray[np.float64]

NO_ITEM = -1
"""Row that pads a ranking with fewer items than places."""

DEFAULT_KS = (5, 10, 20)
_RESAMPLED_VALUES_AT_A_TIME = 2**23


@dataclass(frozen=True)
class Interval:
    """A paired difference of means and its bootstrap confidence interval.

    Args:
        difference: mean of the first values less mean of the second.
        low: lower end.
        high: upper end.
        confidence: of the interval, in (0, 1).
    """

    difference: float
    low: float
    high: float
    confidence: float


def ranks_of_targets(
    rankings: npt.NDArray[np.integer], targets: npt.NDArray[np.integer]
) -> LongArray:
    """Rank of each case's target in its list.

    Args:
        rankings: item rows, best first, shape [B, k], integer; `NO_ITEM` pads short lists.
        targets: item rows, shape [B], integer.

    Returns:
        1-based ranks, shape [B], int64; 0 where the list does not hold the target.

    Raises:
        DataError: shapes that do not match, a negative target, or an item twice in one list.

    >>> ranks_of_targets(np.array([[4, 7, 9], [4, 7, -1]]), np.array([7, 9])).tolist()
    [2, 0]
    """
    rankings, targets = np.asarray(rankings), np.asarray(targets)
    if rankings.ndim != 2 or targets.shape != rankings.shape[:1]:
        raise DataError(f"rankings of shape {rankings.shape}, targets of shape {targets.shape}")
    if rankings.dtype.kind not in "iu" or targets.dtype.kind not in "iu":
        raise DataError(f"rows must be integers, not {rankings.dtype} and {targets.dtype}")
    if (targets < 0).any():
        raise DataError("a target is negative")
    ordered = np.sort(rankings, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_ITEM)
    if repeated.any():
        raise DataError(f"case {int(repeated.any(axis=1).argmax())} ranks an item twice")
    if rankings.shape[1] == 0:
        return np.zeros(len(targets), dtype=np.int64)
    hits = rankings == targets[:, None]
    return np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, 0).astype(np.int64)


def recall_at_k(ranks: LongArray, k: int) -> Values:
    """Recall@k per case: 1 if the target is among the first k, else 0.

    Args:
        ranks: as `ranks_of_targets` gives them, shape [B].
        k: places that count, at least 1.

    Returns:
        Shape [B], float64.

    >>> recall_at_k(np.array([1, 5, 6, 0]), 5).tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    return _within(ranks, k).astype(np.float64)


def ndcg_at_k(ranks: LongArray, k: int) -> Values:
    """NDCG@k per case: 1 / log2(rank + 1) if the target is among the first k, else 0.

    Args:
        ranks: as `ranks_of_targets` gives them, shape [B].
        k: places that count, at least 1.

    Returns:
        Shape [B], float64.

    >>> ndcg_at_k(np.array([1, 3, 6, 0]), 5).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """
    within = _within(ranks, k)
    return np.where(within, 1.0 / np.log2(np.where(within, ranks, 1) + 1.0), 0.0)


def per_case_metrics(
    rankings: npt.NDArray[np.integer],
    targets: npt.NDArray[np.integer],
    ks: Sequence[int] = DEFAULT_KS,
) -> dict[str, Values]:
    """Every metric per case, as input to means and to `paired_bootstrap`.

    Args:
        rankings: item rows, best first, shape [B, max(ks) or more].
        targets: item rows, shape [B].
        ks: cut-offs.

    Returns:
        "recall@5", ..., "ndcg@5", ... -> shape [B], float64.

    Raises:
        DataError: as `ranks_of_targets`; also lists shorter than a cut-off.
    """
    if not ks or max(ks) > np.asarray(rankings).shape[-1]:
        raise DataError(f"cut-offs {tuple(ks)} for lists of {np.asarray(rankings).shape[-1]}")
    return metrics_of_ranks(ranks_of_targets(rankings, targets), ks)


def metrics_of_ranks(ranks: LongArray, ks: Sequence[int]) -> dict[str, Values]:
    """Every metric per case from `ranks_of_targets`; see `per_case_metrics`."""
    return {f"recall@{k}": recall_at_k(ranks, k) for k in ks} | {
        f"ndcg@{k}": ndcg_at_k(ranks, k) for k in ks
    }


def evaluate_rankings(
    rankings: npt.NDArray[np.integer],
    targets: npt.NDArray[np.integer],
    ks: Sequence[int] = DEFAULT_KS,
) -> dict[str, float]:
    """Every metric's mean over the cases; arguments and errors as `per_case_metrics`.

    Raises:
        DataError: also when there is no case.

    >>> evaluate_rankings(np.array([[4, 7], [5, 6]]), np.array([7, 5]), ks=(1, 2))["recall@1"]
    0.5
    """
    if len(targets) == 0:
        raise DataError("there is no case to evaluate")
    return means(per_case_metrics(rankings, targets, ks))


def means(values: Mapping[str, Values]) -> dict[str, float]:
    """Mean of each metric over the cases."""
    return {name: float(array.mean()) for name, array in values.items()}


def paired_bootstrap(
    first: Values,
    second: Values,
    *,
    confidence: float = 0.95,
    resamples: int = 9_999,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of the mean difference between two arms judged on the same cases.

    Cases are resampled, so each keeps its pair of values.

    Args:
        first: a metric per case of one arm, shape [B].
        second: the same metric of the other arm, same cases in the same order, shape [B].
        confidence: of the interval, in (0, 1).
        resamples: bootstrap resamples.
        seed: of the resampling; the same seed gives the same interval.

    Raises:
        DataError: shapes that differ, or fewer than two cases.
    """
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise DataError(f"paired values of shapes {first.shape} and {second.shape}")
    if len(first) < 2:
        raise DataError(f"{len(first)} cases are too few for an interval")
    difference = first - second
    result = stats.bootstrap(
        (difference,),
        np.mean,
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, _RESAMPLED_VALUES_AT_A_TIME // len(difference)),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Interval(float(difference.mean()), float(interval.low), float(interval.high), confidence)


def _within(ranks: LongArray, k: int) -> npt.NDArray[np.bool_]:
    if k < 1:
        raise DataError(f"k is {k}; it must be at least 1")
    ranks = np.asarray(ranks)
    return (ranks >= 1) & (ranks <= k)
