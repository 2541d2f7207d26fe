"""``gti compare``: arms x seeds on one data set under one budget; resumable.

Every arm has the same backbone, the same SIDs, the same number of fine-tuning steps of the same
batch size, and is judged on the same cases. Each part (grounding, fine-tuning, ranking) is kept in
its own folder under the output and not done again; the result is written anew after every arm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gti_core.errors import PipelineError
from gti_core.files import read_json, write_json
from gti_core.machine import machine
from gti_core.pipeline.arms import LM_ARMS, PAPER_ARMS, SEEDED, Arm, check_arms, title_of
from gti_core.pipeline.baselines import fit_baseline
from gti_core.pipeline.evaluate import EvaluateOptions, rank_targets
from gti_core.pipeline.finetune import FinetuneOptions, finetune, load_finetuned, model_of
from gti_core.pipeline.ground import GroundOptions, ground
from gti_core.pipeline.stage import Stage, identity_of
from gti_core.pipeline.tokenize import Tokens, load_tokens
from gti_core.types import JsonDict, LongArray

if TYPE_CHECKING:
    from gti_core.data.splits import EvalCase

RANKS_FORMAT = "gti-ranks/1"
Progress = Callable[[str, int, int, float | None], None]
"""Called with (what runs, done, total, loss or None)."""


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison.

    Args:
        arms: names from `gti_core.pipeline.arms`.
        seeds: seeds of initialization, grounding, fine-tuning and SASRec.
        ground: grounding of the arms that are grounded; initialization, objective and seed are
            set by arm.
        finetune: fine-tuning of every arm; tasks and seed are set by arm.
        evaluate: evaluation of every arm.
        dtype: of the weights while ranking.
    """

    arms: tuple[str, ...] = PAPER_ARMS
    seeds: tuple[int, ...] = (0,)
    ground: GroundOptions = field(default_factory=GroundOptions)
    finetune: FinetuneOptions = field(default_factory=FinetuneOptions)
    evaluate: EvaluateOptions = field(
        default_factory=lambda: EvaluateOptions(ks=(5, 10, 20, 50), beam_width=50)
    )
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_arms(self.arms)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise PipelineError("name at least one seed, and each once")


class Comparison:
    """One comparison in its folder.

    Args:
        tokens_folder: folder of ``gti tokenize``.
        output: folder for everything that is kept.
        options: options.
        cache_dir: where the demo backbone is converted to.
        backbone: Hugging Face folder; None for the demo backbone.
        progress: called as the work goes on.
    """

    def __init__(
        self,
        tokens_folder: Path,
        output: Path,
        options: CompareOptions,
        *,
        cache_dir: Path,
        backbone: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.output = output
        self.options = options
        self._tokens_folder = tokens_folder
        self._cache_dir = cache_dir
        self._backbone = backbone
        self._progress = progress
        self.tokens: Tokens = load_tokens(tokens_folder)
        split = self.tokens.prepared.split
        cases: Sequence[EvalCase] = split.test if options.evaluate.split == "test" else split.valid
        self.cases = list(cases[: options.evaluate.limit or None])
        if not self.cases:
            raise PipelineError(f"the data holds no {options.evaluate.split} cases")
        catalog = self.tokens.catalog
        self._targets = np.array([catalog.row(case.target) for case in self.cases])

    def runs(self) -> list[tuple[str, int]]:
        """(arm, seed) in the order of the table; an arm without randomness runs once."""
        return [
            (arm, seed)
            for arm in self.options.arms
            for seed in (self.options.seeds if arm in SEEDED else self.options.seeds[:1])
        ]

    def run(self, on_row: Callable[[list[JsonDict]], None] | None = None) -> list[JsonDict]:
        """Do what is not done yet.

        Args:
            on_row: called with all rows so far after each one.

        Returns:
            One row per run: "arm", "seed", metrics, "train_s", "ground_s", "decode_s", figures, and
            "ranks", the rank of each case's target (0: not among the largest cut-off's).
        """
        rows: list[JsonDict] = []
        for arm, seed in self.runs():
            rows.append(self._lm(LM_ARMS[arm], seed) if arm in LM_ARMS else self._base(arm, seed))
            if on_row is not None:
                on_row(rows)
        return rows

    def document(self, rows: Sequence[JsonDict]) -> JsonDict:
        """The result as JSON, without the ranks."""
        from gti_core.evaluation.report import intervals

        evaluate, stage = self.options.evaluate, self.tokens.stage
        return {
            "dataset": self.tokens.prepared.name,
            "split": evaluate.split,
            "cases": len(self.cases),
            "items": len(self.tokens.catalog),
            "ranking": "full catalogue",
            "seen_excluded": evaluate.exclude_seen,
            "beam_width": evaluate.beam_width,
            "options": {
                "tokenize": stage.options,
                "ground": asdict(self.options.ground),
                "finetune": asdict(self.options.finetune),
                "dtype": self.options.dtype,
            },
            "quantization": stage.figures["report"],
            "machine": machine(),
            "rows": [{k: v for k, v in row.items() if k != "ranks"} for row in rows],
            "intervals": intervals(rows, evaluate.ks),
        }

    def grounded_folder(self, arm: Arm, seed: int) -> Path:
        """Folder of an arm's rows; arms that start alike share it."""
        return self.output / f"grounded-{arm.initialization}-{arm.objective}-s{seed}"

    def tuned_folder(self, arm: Arm, seed: int) -> Path:
        """Folder of an arm's fine-tuning."""
        return self.output / f"tuned-{arm.name}-s{seed}"

    def _lm(self, arm: Arm, seed: int) -> JsonDict:
        name = f"{arm.name} s{seed}"
        grounded = ground(
            self._tokens_folder,
            self.grounded_folder(arm, seed),
            replace(
                self.options.ground,
                initialization=arm.initialization,
                objective=arm.objective,
                loop=replace(self.options.ground.loop, seed=seed),
            ),
            cache_dir=self._cache_dir,
            backbone=self._backbone,
            progress=self._steps(f"{name} ground"),
        )
        tuned = finetune(
            grounded.folder,
            self.tuned_folder(arm, seed),
            replace(
                self.options.finetune,
                tasks=arm.tasks,
                loop=replace(self.options.finetune.loop, seed=seed),
            ),
            cache_dir=self._cache_dir,
            progress=self._steps(f"{name} SFT"),
        )
        kept = self._kept(arm.name, seed, tuned.identity)
        if kept is None:
            began = time.monotonic()
            ranks = self._rank(tuned, name)
            kept = self._keep(arm.name, seed, tuned.identity, ranks, time.monotonic() - began)
        ground_figures, figures = grounded.figures, tuned.figures
        return {
            **self._row(arm.name, seed, kept),
            "train_s": figures["seconds"],
            "ground_s": ground_figures["seconds"] if arm.objective != "none" else 0.0,
            "ground_steps": ground_figures["steps"],
            "steps": figures["steps"],
            "tokens": figures["tokens"],
            "loss_first": figures["loss_first"],
            "loss_last": figures["loss_last"],
            "effective_rank_before": ground_figures["effective_rank"],
            "ranks": kept["ranks"],
        }

    def _base(self, arm: str, seed: int) -> JsonDict:
        from gti_core.evaluation.metrics import ranks_of_targets

        prepared, model = self.tokens.prepared, self.tokens.stage.identity
        if arm == "sasrec":
            from gti_core.evaluation.sasrec import SasRecConfig

            model = identity_of(arm, asdict(SasRecConfig()), model)
        kept = self._kept(arm, seed, model)
        if kept is None:
            began = time.monotonic()
            ranker = fit_baseline(arm, prepared, seed=seed)
            fitted = time.monotonic()
            rows, evaluate = prepared.rows, self.options.evaluate
            histories = [[rows[i] for i in case.history] for case in self.cases]
            # The catalogue and the prepared data list items in one order.
            rankings = ranker.rank(histories, max(evaluate.ks), evaluate.exclude_seen)
            ranks = ranks_of_targets(rankings, self._targets)
            kept = self._keep(
                arm, seed, model, ranks, time.monotonic() - fitted, train_s=fitted - began
            )
        row = self._row(arm, seed, kept)
        return {**row, "train_s": kept["train_s"], "ground_s": 0.0, "ranks": kept["ranks"]}

    def _rank(self, tuned: Stage, name: str) -> LongArray:
        from gti_core.fusion import fuse

        finetuned = load_finetuned(tuned.folder)
        lm = model_of(finetuned, cache_dir=self._cache_dir, dtype=self.options.dtype)
        fuse(lm.backbone)

        def report(phase: str, done: int, total: int) -> None:
            if self._progress is not None:
                self._progress(f"{name} rank", done, total, None)

        return rank_targets(
            lm, self.tokens.catalog, finetuned.prompt, self.cases, self.options.evaluate, report
        )

    def _steps(self, what: str) -> Callable[[int, int, float], None] | None:
        progress = self._progress
        if progress is None:
            return None
        return lambda step, steps, loss: progress(what, step, steps, loss)

    def _ranks_file(self, arm: str, seed: int) -> Path:
        return self.output / f"ranks-{arm}-s{seed}.json"

    def _identity(self, arm: str, seed: int, model: str) -> str:
        options = {"arm": arm, "seed": seed, "dtype": self.options.dtype}
        # The batch size of decoding changes nothing but time.
        judged = {**asdict(self.options.evaluate), "batch_size": None}
        return identity_of("ranks", {**options, **judged}, model)

    def _kept(self, arm: str, seed: int, model: str) -> JsonDict | None:
        path = self._ranks_file(arm, seed)
        if not path.is_file():
            return None
        kept: JsonDict = read_json(path)
        if kept.get("format") != RANKS_FORMAT or kept["identity"] != self._identity(
            arm, seed, model
        ):
            raise PipelineError(
                f"{path} was ranked under other options; choose another folder or remove it"
            )
        return kept

    def _keep(
        self,
        arm: str,
        seed: int,
        model: str,
        ranks: LongArray,
        decode_s: float,
        *,
        train_s: float = 0.0,
    ) -> JsonDict:
        kept: JsonDict = {
            "format": RANKS_FORMAT,
            "identity": self._identity(arm, seed, model),
            "arm": arm,
            "seed": seed,
            "decode_s": round(decode_s, 1),
            "train_s": round(train_s, 1),
            "ranks": ranks.tolist(),
        }
        write_json(self._ranks_file(arm, seed), kept, indent=None)
        return kept

    def _row(self, arm: str, seed: int, kept: JsonDict) -> JsonDict:
        from gti_core.evaluation.metrics import means, metrics_of_ranks

        ranks = np.array(kept["ranks"], dtype=np.int64)
        return {
            "arm": arm,
            "seed": seed,
            **means(metrics_of_ranks(ranks, self.options.evaluate.ks)),
            "decode_s": kept["decode_s"],
        }


def compare(
    comparison: Comparison, *, json: Path | None = None, markdown: Path | None = None
) -> str:
    """Run a comparison to its end and write its result after every arm.

    Args:
        comparison: results.json and results.md are written into its folder.
        json: also write the JSON there.
        markdown: also write the tables there.

    Returns:
        The tables as Markdown.

    Raises:
        PipelineError: options that contradict what the folder holds.
        StoppedError: interrupted; the same call goes on from there.
    """
    from gti_core.data.files import write_atomic
    from gti_core.evaluation import report

    titles = {name: title_of(name) for name in comparison.options.arms}
    tables = ""

    def write(rows: list[JsonDict]) -> None:
        nonlocal tables
        result = comparison.document(rows)
        tables = report.markdown(result, titles)
        for path in filter(None, (comparison.output / "results.json", json)):
            write_json(path, result)
        for path in filter(None, (comparison.output / "results.md", markdown)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, tables.encode())

    comparison.run(write)
    return tables
