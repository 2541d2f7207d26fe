"""The figures as rows of text, for the page and for the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from gti_core.diagnosis.collect import Diagnosis
from gti_core.diagnosis.figures import TIED
from gti_core.grounding.diagnostics import Rsa

UNDEFINED = "\N{EN DASH}"


@dataclass(frozen=True)
class Row:
    """One state of one side of an arm, numbers written out; `UNDEFINED` where there is none.

    Args:
        name: the arm's.
        side: "tied", "input" or "output".
        state: before or after fine-tuning.
        effective_rank: of the SID rows.
        mean_cosine: of the SID rows.
        pearson: RSA, mean over levels.
        spearman: the same with ranks.
        levels: both correlations of each level.
        all: both correlations of all rows at once.
    """

    name: str
    side: str
    state: str
    effective_rank: str
    mean_cosine: str
    pearson: str
    spearman: str
    levels: tuple[str, ...]
    all: str

    @property
    def label(self) -> str:
        """The arm's name, with the side where there are two."""
        return self.name if self.side == TIED else f"{self.name} ({self.side})"


def table_rows(diagnosis: Diagnosis) -> list[Row]:
    """Rows in the order of the arms, before fine-tuning first."""
    return [
        Row(
            arm.name,
            side.side,
            snap.state,
            f"{snap.effective_rank:.1f}",
            f"{snap.mean_cosine:.3f}",
            _number(snap.rsa.mean.pearson),
            _number(snap.rsa.mean.spearman),
            tuple(_pair(level) for level in snap.rsa.levels),
            _pair(snap.rsa.all),
        )
        for arm in diagnosis.arms
        for side in arm.sides
        for snap in side.snapshots
    ]


def markdown_table(diagnosis: Diagnosis) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| arm | state | effective rank | mean cosine | RSA Pearson | RSA Spearman |",
        "|---|---|---|---|---|---|",
    ]
    for row in table_rows(diagnosis):
        name = row.label.replace("\\", "\\\\").replace("|", "\\|")
        lines.append(
            f"| {name} | {row.state} | {row.effective_rank} | {row.mean_cosine} "
            f"| {row.pearson} | {row.spearman} |"
        )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.3f}"


def _pair(rsa: Rsa) -> str:
    return f"{_number(rsa.pearson)} / {_number(rsa.spearman)}"
