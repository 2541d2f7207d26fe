"""``gti evaluate``: Recall@k and NDCG@k over the whole catalogue, beside the baselines.

Every item competes; the list is what constrained beam search returns. Whether items of the
history may come back is stated in the result ("seen_excluded"); the whole history is excluded,
not only the part that fits the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gti_core.catalog import ItemCatalog
from gti_core.data.prepared import PreparedData
from gti_core.data.splits import EvalCase
from gti_core.decoding.beam import BeamSearch
from gti_core.decoding.constraint import Admissible, ConstraintIndex
from gti_core.decoding.target import TargetSearch
from gti_core.errors import PipelineError
from gti_core.files import write_json
from gti_core.pipeline.baselines import fit_baseline
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import JsonDict, LongArray
from gti_core.vocabulary import SidVocabulary

if TYPE_CHECKING:
    from gti_core.lm import SidLM

SPLITS = ("test", "valid")
SHOWN_BASELINES = {
    "popularity": "popularity",
    "item-knn": "item-knn",
    "item-knn-recency": "item-knn (recency)",
}
"""Baselines of every evaluation -> their names in its result."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of an evaluation.

    Args:
        split: "test" or "valid".
        exclude_seen: items of the history can't come back.
        ks: cut-offs.
        beam_width: W; at least the largest cut-off.
        batch_size: prompts decoded together.
        limit: only the first so many cases, 0 for all; for a quick look.
    """

    split: str = "test"
    exclude_seen: bool = True
    ks: tuple[int, ...] = (5, 10, 20)
    beam_width: int = 30
    batch_size: int = 8
    limit: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.limit < 0:
            raise PipelineError("batch size must be at least 1 and limit at least 0")
        if self.split not in SPLITS:
            raise PipelineError(f"split must be one of {', '.join(SPLITS)}, not {self.split!r}")
        if not self.ks or min(self.ks) < 1 or self.beam_width < max(self.ks):
            raise PipelineError(
                f"beam_width {self.beam_width} must be at least the largest of ks {self.ks}"
            )


def rank_cases(
    lm: SidLM,
    catalog: ItemCatalog,
    prompt: AppendOnlyPrompt,
    cases: Sequence[EvalCase],
    options: EvaluateOptions,
    progress: Callable[[str, int, int], None] | None = None,
) -> LongArray:
    """Catalogue rows that the model recommends for each case, shape [B, max(ks)], -1 padded."""
    from gti_core.decoding.cached import run_searches

    asked = _Asked(lm, catalog, prompt, cases, options)
    k = max(options.ks)
    rankings = np.full((len(cases), k), -1, dtype=np.int64)
    for numbers, prompts in asked.batches(progress):
        searches = [BeamSearch(*asked.beams(number)) for number in numbers]
        run_searches(lm, prompts, searches)
        for number, search in zip(numbers, searches, strict=True):
            rows = [found.row for found in search.results(k)]
            rankings[number, : len(rows)] = rows
    return rankings


def rank_targets(
    lm: SidLM,
    catalog: ItemCatalog,
    prompt: AppendOnlyPrompt,
    cases: Sequence[EvalCase],
    options: EvaluateOptions,
    progress: Callable[[str, int, int], None] | None = None,
) -> LongArray:
    """Rank of each case's target in the list of `rank_cases`, 0 where it is not in it, shape [B].

    What can't stand above the target is not computed (`gti_core.decoding.target`). Equal to the
    whole search but for rounding.
    """
    from gti_core.decoding.cached import run_searches
    from gti_core.decoding.tree import fits_tree

    asked = _Asked(lm, catalog, prompt, cases, options)
    targets = [catalog.row(case.target) for case in cases]
    ranks = np.zeros(len(cases), dtype=np.int64)
    for numbers, prompts in asked.batches(progress):
        searches = [
            TargetSearch(*asked.beams(number), catalog.items[targets[number]].sid)
            for number in numbers
        ]
        if fits_tree(lm.backbone, prompts, searches):
            run_searches(lm, prompts, searches)
            ranks[numbers] = [search.rank for search in searches]
            continue
        # A search that starts again needs beams that share their prompt.
        whole = [BeamSearch(*asked.beams(number)) for number in numbers]
        run_searches(lm, prompts, whole)
        for number, search in zip(numbers, whole, strict=True):
            rows = [found.row for found in search.results(max(options.ks))]
            ranks[number] = rows.index(targets[number]) + 1 if targets[number] in rows else 0
    ranks[ranks > max(options.ks)] = 0
    return ranks


class _Asked:
    """What the cases are asked with: prompts, batches, what may come back."""

    def __init__(
        self,
        lm: SidLM,
        catalog: ItemCatalog,
        prompt: AppendOnlyPrompt,
        cases: Sequence[EvalCase],
        options: EvaluateOptions,
    ) -> None:
        self._lm = lm
        self._catalog = catalog
        self._cases = cases
        self._options = options
        self._index = ConstraintIndex(catalog.sids)
        self._prompts = [
            prompt.token_ids(
                [catalog.items[catalog.row(i)].sid for i in case.history], lm.vocabulary
            )
            for case in cases
        ]

    def batches(
        self, progress: Callable[[str, int, int], None] | None
    ) -> Iterator[tuple[list[int], list[list[int]]]]:
        """Numbers of cases and their prompts."""
        # Prompts of one length share a batch: less padding.
        order = sorted(range(len(self._prompts)), key=lambda number: len(self._prompts[number]))
        size = self._options.batch_size
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            yield batch, [self._prompts[number] for number in batch]
            if progress is not None:
                progress("decode", start + len(batch), len(order))

    def beams(self, number: int) -> tuple[ConstraintIndex, SidVocabulary, Admissible, int]:
        """The arguments of a case's search."""
        catalog, case = self._catalog, self._cases[number]
        seen = {catalog.row(i) for i in case.history} if self._options.exclude_seen else ()
        return (
            self._index,
            self._lm.vocabulary,
            self._index.admissible(seen),
            self._options.beam_width,
        )


def evaluate(
    lm: SidLM,
    catalog: ItemCatalog,
    prompt: AppendOnlyPrompt,
    prepared: PreparedData,
    options: EvaluateOptions,
    *,
    output: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> JsonDict:
    """Evaluate a model and the baselines on the same cases.

    Returns:
        {"dataset", "split", "cases", "seen_excluded", "beam_width", "rows": [{"arm",
        "recall@5", ...}], "intervals": [...]}; also written to ``output`` as JSON when given.
    """
    from gti_core.evaluation.metrics import (
        means,
        metrics_of_ranks,
        paired_bootstrap,
        ranks_of_targets,
    )

    cases = list(prepared.split.test if options.split == "test" else prepared.split.valid)
    if options.limit:
        cases = cases[: options.limit]
    if not cases:
        raise PipelineError(f"the data holds no {options.split} cases")
    if [item.item_id for item in catalog] != [item.item_id for item in prepared.items]:
        raise PipelineError("the model's catalogue and the data hold different items")
    targets = np.array([catalog.row(case.target) for case in cases], dtype=np.int64)
    histories = [[catalog.row(i) for i in case.history] for case in cases]
    began = time.monotonic()
    ranks = {"gti": rank_targets(lm, catalog, prompt, cases, options, progress)}
    seconds = time.monotonic() - began
    for name, shown in SHOWN_BASELINES.items():
        ranker = fit_baseline(name, prepared)
        rankings = ranker.rank(histories, max(options.ks), options.exclude_seen)
        ranks[shown] = ranks_of_targets(rankings, targets)
    values = {name: metrics_of_ranks(r, options.ks) for name, r in ranks.items()}
    intervals = []
    for metric in (f"recall@{max(options.ks[:2])}", f"ndcg@{max(options.ks[:2])}"):
        for name in values:
            if name != "gti":
                interval = paired_bootstrap(values["gti"][metric], values[name][metric])
                intervals.append({"metric": metric, "against": name, **asdict(interval)})
    result: JsonDict = {
        "dataset": prepared.name,
        "split": options.split,
        "cases": len(cases),
        "items": len(catalog),
        "ranking": "full catalogue",
        "seen_excluded": options.exclude_seen,
        "beam_width": options.beam_width,
        "decode_s": round(seconds, 1),
        "rows": [{"arm": name, **means(value)} for name, value in values.items()],
        "intervals": intervals,
    }
    if output is not None:
        write_json(output, result)
    return result


def markdown_table(result: JsonDict) -> str:
    """The result as a Markdown table with the facts that it depends on."""
    from gti_core.evaluation.report import facts_line

    metrics = [name for name in result["rows"][0] if name != "arm"]
    lines = [
        facts_line(result),
        "",
        "| arm | " + " | ".join(metrics) + " |",
        "|---|" + "---|" * len(metrics),
    ]
    for row in result["rows"]:
        cells = " | ".join(f"{row[name]:.4f}" for name in metrics)
        lines.append(f"| {row['arm']} | {cells} |")
    return "\n".join(lines)
