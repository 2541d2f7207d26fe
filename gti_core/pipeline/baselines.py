"""The baselines that evaluations stand beside, fitted on prepared data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gti_core.data.prepared import PreparedData

if TYPE_CHECKING:
    from gti_core.evaluation.baselines import Ranker

TITLES = {
    "popularity": "popularity",
    "item-knn": "item-kNN (cosine, 100)",
    "item-knn-recency": "item-kNN, recency-weighted",
    "sasrec": "SASRec",
}
"""Name -> name for people."""


def fit_baseline(name: str, prepared: PreparedData, *, seed: int = 0) -> Ranker:
    """A baseline fitted on the training histories; its rows are those of ``prepared.items``.

    Args:
        name: a key of `TITLES`.
        prepared: training histories, and for SASRec validation cases to stop by.
        seed: of SASRec; the others draw nothing.

    Raises:
        PipelineError: SASRec's library is not installed.
    """
    from gti_core.evaluation.baselines import ItemKnn, Popularity

    rows = prepared.rows
    train = [[rows[i] for i in items] for items in prepared.split.train.values()]
    count = len(prepared.items)
    match name:
        case "popularity":
            return Popularity(train, count)
        case "item-knn":
            return ItemKnn(train, count, neighbours=100, weighting="cosine")
        case "item-knn-recency":
            return ItemKnn(train, count, neighbours=200, weighting="tfidf", half_life=2.0)
        case "sasrec":
            from gti_core.evaluation.sasrec import SasRec

            valid = prepared.split.valid
            judges = (
                [[rows[i] for i in case.history] for case in valid],
                [rows[case.target] for case in valid],
            )
            return SasRec(train, count, seed=seed, validation=judges if valid else None)
    raise ValueError(f"no baseline {name!r}")
