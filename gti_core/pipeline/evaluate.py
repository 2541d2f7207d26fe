"""``gti evaluate``: Recall@k and NDCG@k over the whole catalogue, beside the baselines.

Every item competes; the list is what constrained beam search returns. Whether items of the
history may come back is stated in the result ("seen_excluded"); the whole history is excluded,
not only the part that fits the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gti_core.catalog import ItemCatalog
from gti_core.data.prepared import PreparedData
from gti_core.data.splits import EvalCase
from gti_core.decoding.beam import BeamSearch
from gti_core.decoding.constraint import ConstraintIndex
from gti_core.errors import PipelineError
from gti_core.files import write_json
from gti_core.pipeline.baselines import fit_baseline
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import JsonDict, LongArray

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

    index = ConstraintIndex(catalog.sids)
    vocabulary = lm.vocabulary
    k = max(options.ks)
    rankings = np.full((len(cases), k), -1, dtype=np.int64)
    prompts = [
        prompt.token_ids([catalog.items[catalog.row(i)].sid for i in case.history], vocabulary)
        for case in cases
    ]
    # Prompts of one length share a batch: less padding.
    order = sorted(range(len(cases)), key=lambda number: len(prompts[number]))
    for start in range(0, len(order), options.batch_size):
        batch = order[start : start + options.batch_size]
        searches = []
        for number in batch:
            seen = {catalog.row(i) for i in cases[number].history} if options.exclude_seen else ()
            searches.append(
                BeamSearch(index, vocabulary, index.admissible(seen), options.beam_width)
            )
        run_searches(lm, [prompts[number] for number in batch], searches)
        for number, search in zip(batch, searches, strict=True):
            rows = [found.row for found in search.results(k)]
            rankings[number, : len(rows)] = rows
        if progress is not None:
            progress("decode", min(start + len(batch), len(order)), len(order))
    return rankings


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
    from gti_core.evaluation.metrics import means, paired_bootstrap, per_case_metrics

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
    rankings = {"gti": rank_cases(lm, catalog, prompt, cases, options, progress)}
    seconds = time.monotonic() - began
    for name, shown in SHOWN_BASELINES.items():
        ranker = fit_baseline(name, prepared)
        rankings[shown] = ranker.rank(histories, max(options.ks), options.exclude_seen)
    values = {name: per_case_metrics(r, targets, options.ks) for name, r in rankings.items()}
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
