"""The arms of a comparison: what they start from, what they learn, what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gti_core.errors import PipelineError
from gti_core.pipeline.baselines import TITLES


@dataclass(frozen=True)
class Arm:
    """A language-model arm.

    Args:
        name: as it stands in tables.
        title: for people.
        initialization: of the SID rows, as in `gti_core.pipeline.ground.GroundOptions`.
        objective: of grounding, the same.
        tasks: of fine-tuning, as in `gti_core.pipeline.finetune.FinetuneOptions`.
    """

    name: str
    title: str
    initialization: str
    objective: str
    tasks: tuple[str, ...]


NEXT = ("next",)
MULTITASK = ("next", "align")

LM_ARMS = {
    arm.name: arm
    for arm in (
        Arm("mean", "mean initialization + SFT", "mean", "none", NEXT),
        Arm("random", "random initialization + SFT", "random", "none", NEXT),
        Arm("text-mean", "text-mean initialization + SFT", "text-mean", "none", NEXT),
        Arm("lc-rec", "LC-Rec: mean initialization + multi-task SFT", "mean", "none", MULTITASK),
        Arm("gti-nll", "GTI (nll) + SFT", "mean", "nll", NEXT),
        Arm("gti-regression", "GTI (regression) + SFT", "mean", "regression", NEXT),
        Arm("gti-whitened", "GTI (regression, whitened) + SFT", "mean", "whitened", NEXT),
        Arm("gti-both", "GTI (regression, then nll) + SFT", "mean", "regression+nll", NEXT),
        Arm("gti-multitask", "GTI (nll) + multi-task SFT", "mean", "nll", MULTITASK),
    )
}
PAPER_ARMS = (
    "popularity",
    "item-knn",
    "sasrec",
    "mean",
    "random",
    "lc-rec",
    "gti-nll",
    "gti-regression",
    "gti-multitask",
)
SEEDED = frozenset({"sasrec", *LM_ARMS})
"""Arms whose result depends on the seed; the others run once."""


def title_of(name: str) -> str:
    """An arm's name for people."""
    return LM_ARMS[name].title if name in LM_ARMS else TITLES[name]


def check_arms(names: Sequence[str]) -> None:
    """Raises PipelineError for an unknown arm, one named twice, or none."""
    known = [*TITLES, *LM_ARMS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PipelineError(f"unknown arm {unknown[0]!r}; known: {', '.join(known)}")
    if not names or len(set(names)) != len(names):
        raise PipelineError("name at least one arm, and each once")
