"""How well new items are recommended that the model never saw in training, way by way.

    python -m bench.onboarding_quality --data runs/scientific/prepared --work runs/onboarding \\
        [--retrained runs/scientific/compare/tuned-gti-nll-s0] [--json PATH]

A share of the items is taken out of all training: quantizer, grounding and fine-tuning know the
others only. Then the new items come from their texts alone, in several ways, and the test events
tell: those whose target is a new item, and those whose target is an old one. All items compete, new
and old; items of the history are left out. The trained parts are kept under --work and reused.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.output import load_average, publish
from gti_core.bundle.delta import CatalogState, Delta, Rows
from gti_core.bundle.format import Bundle, load_bundle
from gti_core.data.prepared import PreparedData
from gti_core.data.splits import EvalCase, Split
from gti_core.evaluation.metrics import means, metrics_of_ranks, paired_bootstrap, ranks_of_targets
from gti_core.fusion import fuse
from gti_core.onboarding.gate import GateOptions
from gti_core.onboarding.grounder import GrounderOptions, OnlineGrounder
from gti_core.onboarding.probes import ProbeBeams, rank_probes, search_prefixes
from gti_core.onboarding.start import mapped_rows
from gti_core.pipeline.evaluate import EvaluateOptions, rank_targets
from gti_core.pipeline.export import export_bundle
from gti_core.pipeline.finetune import FinetuneOptions, finetune, load_finetuned, model_of
from gti_core.pipeline.ground import GroundOptions, ground
from gti_core.pipeline.load import bundle_model
from gti_core.pipeline.tokenize import TokenizeOptions, tokenize
from gti_core.quiet import quiet_libraries
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.lora import LoraOptions
from gti_core.types import FloatArray, JsonDict, LongArray, Sid

KS = (10, 20)
BEAM_WIDTH = 50
OPEN_GATE = GateOptions(least_own=0.0, most_drop=1.0, most_lists=1.0, least_similarity=-1.0)


def hold_out(data: PreparedData, share: float, seed: int) -> tuple[PreparedData, set[str]]:
    """The data without a random share of the items, and the ids of that share."""
    ids = sorted(item.item_id for item in data.items)
    new = set(random.Random(seed).sample(ids, round(share * len(ids))))

    def kept(history: Sequence[str]) -> tuple[str, ...]:
        return tuple(item_id for item_id in history if item_id not in new)

    def cases(found: Sequence[EvalCase]) -> tuple[EvalCase, ...]:
        return tuple(
            replace(case, history=kept(case.history))
            for case in found
            if case.target not in new and kept(case.history)
        )

    train = {user: kept(history) for user, history in data.split.train.items()}
    split = Split(
        data.split.kind,
        {user: history for user, history in train.items() if history},
        cases(data.split.valid),
        cases(data.split.test),
    )
    items = tuple(item for item in data.items if item.item_id not in new)
    return PreparedData(f"{data.name}-known", items, split), new


def train(known: PreparedData, work: Path, cache_dir: Path, steps: int, objective: str) -> Bundle:
    """Tokenize, ground, tune and export; each part once."""
    if not (work / "prepared").is_dir():
        known.save(work / "prepared")
    sizes = TokenizeOptions(sizes=(256, 256, 256), quantizer="rqvae", reserve=(0, 0, 256))
    tokenize(work / "prepared", work / "tokens", sizes)
    grounding = LoopConfig(epochs=2.0, batch_size=32, rows_lr=1e-2)
    grounded = GroundOptions(objective=objective, loop=grounding)
    ground(work / "tokens", work / "grounded", grounded, cache_dir=cache_dir)
    tuning = FinetuneOptions(
        lora=LoraOptions(r=16, alpha=32, dropout=0.0),
        instruction="History:\n",
        max_history=20,
        loop=LoopConfig(steps=steps, batch_size=32, lr=1e-3, rows_lr=1e-2, warmup=50),
    )
    finetune(work / "grounded", work / "tuned", tuning, cache_dir=cache_dir)
    if not (work / "bundle").is_dir():
        export_bundle(work / "tuned", work / "bundle", name=known.name)
    return load_bundle(work / "bundle")


@dataclass(frozen=True)
class Case:
    """A test event: catalogue rows of its known history; its target, an item id."""

    past: tuple[int, ...]
    target: str


def cases_of(
    data: PreparedData, bundle: Bundle, new: set[str], most_old: int
) -> tuple[list[Case], list[Case]]:
    """Test events with a new target, and a random sample of those with an old one."""
    found: tuple[list[Case], list[Case]] = ([], [])
    for case in data.split.test:
        past = tuple(bundle.catalog.row(i) for i in case.history if i not in new)
        if past:
            found[case.target not in new].append(Case(past, case.target))
    old = random.Random(0).sample(found[1], min(most_old, len(found[1])))
    return found[0], old


class Judge:
    """Ranks the cases under different catalogues and rows.

    Args:
        bundle: the model that knows the old items.
        cases: what is asked.
        cache_dir: where backbones are kept.
    """

    def __init__(self, bundle: Bundle, cases: Sequence[Case], cache_dir: Path) -> None:
        self._lm = bundle_model(bundle, cache_dir=cache_dir, dtype="bfloat16")
        fuse(self._lm.backbone)
        self._bundle = bundle
        self._cases = cases
        self._base = CatalogState.of(bundle.catalog, bundle.vocabulary)
        self._beams = self._search(self._base)

    def ranks(self, state: CatalogState) -> LongArray:
        """Rank of each case's target under a version, 0 beyond the largest cut-off."""
        same = {item.sid[:-1] for item in self._bundle.catalog}
        known = all(item.sid[:-1] in same for item in state.catalog)
        beams = self._beams if known else self._search(state)
        rankings = rank_probes(self._lm, beams, state, max(KS))
        catalog = state.catalog
        targets = [
            catalog.row(c.target) if c.target in catalog else len(catalog) for c in self._cases
        ]
        return ranks_of_targets(rankings, np.array(targets))

    def _search(self, state: CatalogState) -> ProbeBeams:
        sids = [item.sid for item in self._bundle.catalog]
        prompts = [
            self._bundle.prompt.token_ids([sids[row] for row in case.past], self._lm.vocabulary)
            for case in self._cases
        ]
        seen = [frozenset(case.past) for case in self._cases]
        nothing = [-1] * len(self._cases)
        return search_prefixes(self._lm, state.index, prompts, seen, nothing, beam_width=BEAM_WIDTH)


def existing_codes(bundle: Bundle, vectors: FloatArray) -> list[Sid]:
    """SIDs of new items from codes that exist: the nearest path, and where it is taken the
    nearest free code of the last level."""
    quantizer, taken = bundle.quantizer, {item.sid for item in bundle.catalog}
    paths = quantizer.quantize(vectors)
    points = quantizer.embed(vectors)
    found = []
    for path, point in zip(paths, points, strict=True):
        prefix = tuple(int(code) for code in path[:-1])
        rest = point - quantizer.sums(path[None, :-1])[0]
        order = np.argsort(((quantizer.codebooks[-1] - rest) ** 2).sum(axis=1))
        sid = next((*prefix, int(c)) for c in order if (*prefix, int(c)) not in taken)
        taken.add(sid)
        found.append(sid)
    return found


def content_knn(old: FloatArray, new: FloatArray, cases: Sequence[Case]) -> LongArray:
    """Rankings by cosine to the mean text vector of the history, outside the language model."""
    every = np.concatenate([old, new])
    rankings = np.empty((len(cases), max(KS)), dtype=np.int64)
    for number, case in enumerate(cases):
        scores = every @ old[list(case.past)].mean(axis=0)
        scores[list(case.past)] = -np.inf
        rankings[number] = np.argsort(-scores, kind="stable")[: max(KS)]
    return rankings


def retrained(folder: Path, cases: Sequence[Case], bundle: Bundle, cache_dir: Path) -> LongArray:
    """Ranks of a model that was trained on all items, asked with the same histories."""
    tuned = load_finetuned(folder)
    lm = model_of(tuned, cache_dir=cache_dir, dtype="bfloat16")
    catalog = tuned.grounded.tokens.catalog
    asked = [
        EvalCase("", tuple(bundle.catalog.items[row].item_id for row in case.past), case.target)
        for case in cases
    ]
    options = EvaluateOptions(ks=KS, beam_width=BEAM_WIDTH, batch_size=16)
    return rank_targets(lm, catalog, tuned.prompt, asked, options)


def row(name: str, ranks: LongArray, new: int) -> JsonDict:
    """One line of the table."""
    parts = {"new": ranks[:new], "old": ranks[new:]}
    found: JsonDict = {"way": name}
    for part, those in parts.items():
        for metric, value in means(metrics_of_ranks(those, KS)).items():
            found[f"{part}_{metric}"] = round(value, 4)
    return found


def add_options(parser: argparse._ActionsContainer, *, required: bool = True) -> None:
    """The run's options, ``--json`` excepted."""
    parser.add_argument("--data", type=Path, required=required, help="folder of gti prepare")
    parser.add_argument("--work", type=Path, required=required, help="folder for the trained parts")
    parser.add_argument("--retrained", type=Path, help="gti finetune's folder, on all items")
    parser.add_argument("--share", type=float, default=0.05, help="of items held out")
    parser.add_argument("--steps", type=int, default=528, help="of fine-tuning")
    parser.add_argument("--objective", default="nll", help="of grounding the old items")
    parser.add_argument("--old", type=int, default=2000, help="test events with an old target")
    parser.add_argument("--ridge", type=float, help="of grounding; default: the product's")
    parser.add_argument("--cache-dir", type=Path, default=Path(".gti/cache"))


def measure(options: argparse.Namespace) -> JsonDict:
    """Train what is missing, and judge every way; the result as JSON."""
    quiet_libraries()
    data = PreparedData.load(options.data)
    known, new = hold_out(data, options.share, seed=0)
    bundle = train(known, options.work, options.cache_dir, options.steps, options.objective)
    arrivals = [item for item in data.items if item.item_id in new]

    defaults = GrounderOptions(gate=OPEN_GATE)
    ridge = defaults.ridge if options.ridge is None else options.ridge
    grounder = OnlineGrounder(bundle, options.cache_dir, replace(defaults, ridge=ridge))
    grounder.load()
    base = CatalogState.of(bundle.catalog, bundle.vocabulary)
    began = time.monotonic()
    first_code = bundle.vocabulary.active[-1]
    proposal = grounder.propose(base, arrivals, first_code, lambda stage, done, total: None)
    seconds = time.monotonic() - began
    delta = proposal.delta
    if delta is None or delta.rows is None:
        raise SystemExit("the open gate refused")
    vectors = grounder.vectors(delta.added)
    old_vectors = grounder.vectors(bundle.catalog.items)

    new_cases, old_cases = cases_of(data, bundle, new, options.old)
    judge = Judge(bundle, [*new_cases, *old_cases], options.cache_dir)
    prefixes = np.array([item.sid[:-1] for item in delta.added], dtype=np.int32)
    block = bundle.rows()
    known_rows = block.get("rows_out", block["rows_in"]).numpy()
    first = bundle.vocabulary.offsets[-1]
    last = known_rows[first : first + bundle.vocabulary.active[-1]]

    def private(rows: FloatArray) -> CatalogState:
        return base.apply(replace(delta, rows=Rows(delta.rows.numbers, rows)))

    def plain() -> CatalogState:
        sids = existing_codes(bundle, vectors)
        items = tuple(replace(item, sid=sid) for item, sid in zip(delta.added, sids, strict=True))
        return base.apply(Delta(bundle.vocabulary, items))

    ways: dict[str, Callable[[], CatalogState]] = {
        "existing-codes": plain,
        "mean-rows": lambda: private(np.repeat(last.mean(axis=0)[None], len(arrivals), axis=0)),
        "regression-rows": lambda: private(mapped_rows(bundle.quantizer, last, vectors, prefixes)),
        "copied-rows": lambda: private(grounder.copied_rows(base, arrivals)),
        "grounded-rows": lambda: base.apply(delta),
    }
    cases = [*new_cases, *old_cases]
    ranks = {name: judge.ranks(make()) for name, make in ways.items()}
    after = base.apply(delta).catalog
    targets = np.array([after.row(case.target) for case in cases])
    ranks["content-knn"] = ranks_of_targets(content_knn(old_vectors, vectors, cases), targets)
    if options.retrained is not None:
        ranks["retrained"] = retrained(options.retrained, cases, bundle, options.cache_dir)
    count = len(new_cases)
    unharmed = metrics_of_ranks(judge.ranks(base)[count:], KS)
    grounded = ranks["grounded-rows"]
    differences = {
        "new_recall@10, grounded less content-knn": paired_bootstrap(
            metrics_of_ranks(grounded[:count], KS)["recall@10"],
            metrics_of_ranks(ranks["content-knn"][:count], KS)["recall@10"],
        ),
        "old_recall@10, after less before": paired_bootstrap(
            metrics_of_ranks(grounded[count:], KS)["recall@10"], unharmed["recall@10"]
        ),
    }
    return {
        "items": {"old": len(known.items), "new": len(arrivals)},
        "events": {"new": count, "old": len(old_cases)},
        "old_before": {name: round(value, 4) for name, value in means(unharmed).items()},
        "ground_s": round(seconds, 1),
        "ridge": ridge,
        "rows": [row(name, found, count) for name, found in ranks.items()],
        "differences": {name: asdict(value) for name, value in differences.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.onboarding_quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    load = load_average()
    publish("onboarding_quality", arguments, options.json, load, **measure(options))


if __name__ == "__main__":
    main()
