"""The figures as PNG: cosine matrices, spectra, maps, RSA bars. Drawn without a display."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np

from gti_core.errors import PipelineError

try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
except ModuleNotFoundError as error:  # an image without the research tools
    raise PipelineError(f"gti diagnose needs requirements/dev.lock: {error}") from error

from gti_core.diagnosis.collect import ArmFigures, Diagnosis
from gti_core.diagnosis.figures import AFTER, BEFORE, OUTPUT, TIED, Doubles, Side, Snapshot
from gti_core.grounding.diagnostics import Rsa

DPI = 130
_PANEL = 3.7
_WIDTH = 8.4
# Okabe and Ito's palette, told apart by colour-blind readers; pale yellow left out.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_MARKERS = ("o", "^", "s", "D", "v", "P", "X")
_PLACES = (
    ((4, 0), "left", "center"),
    ((-4, 0), "right", "center"),
    ((0, 3), "center", "bottom"),
    ((0, -3), "center", "top"),
)
_LEAST_SHARE = 1e-4
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    # Names and words come from outside: a dollar sign is no formula.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Panel:
    """One row of a grid: a side of an arm.

    Args:
        label: the arm's name, with the side where there are two.
        arm: the arm.
        side: the side.
        colour: the arm's.
    """

    label: str
    arm: ArmFigures
    side: Side
    colour: Any


def panels_of(diagnosis: Diagnosis) -> list[Panel]:
    """Rows of the grids, arms in the order given, input side before output side."""
    colours: Sequence[Any] = _COLOURS
    if len(diagnosis.arms) > len(_COLOURS):
        colours = list(matplotlib.colormaps["turbo"](np.linspace(0.02, 0.95, len(diagnosis.arms))))
    return [
        Panel(
            arm.name if side.side == TIED else f"{arm.name}, {side.side} rows",
            arm,
            side,
            colour,
        )
        for arm, colour in zip(diagnosis.arms, colours, strict=False)
        for side in arm.sides
    ]


def states_of(diagnosis: Diagnosis) -> list[str]:
    """States that at least one arm has, in order of time."""
    tuned = any(side.at(AFTER) for arm in diagnosis.arms for side in arm.sides)
    return [BEFORE, AFTER] if tuned else [BEFORE]


def cosine_figure(diagnosis: Diagnosis, *, centred: bool = False) -> bytes:
    """Cosine matrices, one row an arm, one column a state, as PNG.

    Args:
        diagnosis: the figures.
        centred: show `Snapshot.centred_cosine`.
    """
    with _drawing():
        figure, grid = _grid(diagnosis, _PANEL + 0.25)
        image: Any = None
        for panel, state, axes in _cells(diagnosis, grid):
            snapshot = panel.side.at(state)
            if snapshot is None:
                continue
            cosine = snapshot.centred_cosine if centred else snapshot.cosine
            # Cosines have a sign: the map's pale middle is 0, the same in every panel.
            image = axes.imshow(cosine, cmap="RdBu_r", vmin=-1, vmax=1)
            _mark_groups(axes, panel.arm)
            axes.set_title(f"{panel.label}\n{state}", loc="left")
            if not centred:
                axes.set_xlabel(_block_means(cosine, len(panel.arm.sample.text_ids)))
        figure.colorbar(
            image,
            ax=grid.ravel().tolist(),
            label="cosine, group means removed" if centred else "cosine",
            shrink=min(1.0, 0.8 / len(grid) + 0.1),
            aspect=30,
            pad=0.02,
        )
        return _png(figure)


def spectrum_figure(diagnosis: Diagnosis) -> bytes:
    """Normalized singular values of all arms, before dashed, after solid, as PNG."""
    panels = panels_of(diagnosis)
    outputs = [panel for panel in panels if panel.side.side == OUTPUT]
    parts = [
        [panel for panel in panels if panel.side.side != OUTPUT],
        *([outputs] if outputs else []),
    ]
    with _drawing():
        figure = _figure(_WIDTH, 4.6 * len(parts))
        every = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
        for part, axes in zip(parts, every, strict=True):
            labels = []
            for panel in part:
                for snapshot in panel.side.snapshots:
                    values = snapshot.spectrum
                    axes.plot(
                        np.arange(1, len(values) + 1),
                        np.maximum(values, _LEAST_SHARE / 100),
                        color=panel.colour,
                        linestyle="--" if snapshot.state == BEFORE else "-",
                        linewidth=1.8,
                    )
                    labels.append(
                        f"{panel.label}, {snapshot.state}: rank {snapshot.effective_rank:.1f}"
                    )
            seen = np.concatenate([s.spectrum for p in part for s in p.side.snapshots])
            least = float(seen[seen >= _LEAST_SHARE].min(initial=1.0))
            longest = max(
                max(1, int((s.spectrum >= _LEAST_SHARE).sum()))
                for p in part
                for s in p.side.snapshots
            )
            axes.set_yscale("log")
            axes.set_ylim(min(least / 2, 0.1), 1.3)
            axes.set_xlim(1 - 0.02 * longest, 1.02 * longest)
            # The default formatter writes powers as formulas.
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel("singular value, by size")
            axes.set_ylabel("share of the largest")
            axes.grid(color="#dddddd", linewidth=0.6)
            _legend(axes, axes.get_lines(), labels)
        return _png(figure)


def map_figure(diagnosis: Diagnosis) -> bytes:
    """Rows on two principal components, one row an arm, one column a state, as PNG."""
    with _drawing():
        figure, grid = _grid(diagnosis, _PANEL + 0.55, share=True)
        deepest: list[Any] = []
        words = []
        for panel, state, axes in _cells(diagnosis, grid):
            snapshot = panel.side.at(state)
            if snapshot is None:
                continue
            axes.scatter(*snapshot.word_points.T, s=9, color="#999999", linewidths=0)
            points = [
                axes.scatter(
                    *snapshot.sid_points[panel.side.point_levels == level].T,
                    s=16,
                    color=_COLOURS[level % len(_COLOURS)],
                    marker=_MARKERS[level % len(_MARKERS)],
                    alpha=0.6,
                    linewidths=0,
                )
                for level in range(len(panel.arm.levels))
            ]
            deepest = max(deepest, points, key=len)
            first, second = panel.side.explained
            axes.set_xlabel(f"component 1 ({first:.0%} of the variance)")
            if state == BEFORE:
                axes.set_ylabel(f"component 2 ({second:.0%})")
            axes.set_title(f"{panel.label}\n{state}", loc="left")
            words.append((axes, snapshot, panel.arm.sample.words))
        labels = [f"SID level {level + 1}" for level in range(len(deepest))]
        figure.legend(
            deepest, labels, loc="outside upper left", ncols=min(4, len(labels)), frameon=False
        )
        figure.draw_without_rendering()
        for axes, snapshot, names in words:
            _place_words(figure, axes, snapshot, names)
        return _png(figure)


def rsa_figure(diagnosis: Diagnosis) -> bytes:
    """RSA of all arms as bars (mean over levels) with a mark per level, as PNG."""
    panels = panels_of(diagnosis)
    bars = [(panel, snapshot) for panel in panels for snapshot in panel.side.snapshots]
    with _drawing():
        figure = _figure(_WIDTH, 1.3 + 0.5 * len(bars))
        left, right = figure.subplots(1, 2, sharey=True)
        places = np.arange(len(bars), dtype=float)
        for axes, measure in ((left, "pearson"), (right, "spearman")):
            for place, (panel, snapshot) in zip(places, bars, strict=True):
                _rsa_bar(axes, place, panel.colour, snapshot, measure)
            values = [_value(r, measure) or 0.0 for _, s in bars for r in _every_rsa(s)]
            least, most = min(0.0, *values), max(0.0, *values)
            room = max(most - least, 0.2)
            ticks = MaxNLocator(5).tick_values(least, most)
            axes.set_xticks([tick for tick in ticks if -1 <= tick <= 1])
            axes.set_xlim(least - 0.06 * room, most + 0.5 * room)
            axes.axvline(0, color="#666666", linewidth=0.8)
            axes.set_title(f"{measure.capitalize()} correlation", loc="left")
            axes.grid(axis="x", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
        left.set_yticks(places, [f"{panel.label}, {s.state}" for panel, s in bars])
        left.set_ylim(len(bars) - 0.4, -0.6)
        return _png(figure)


def _every_rsa(snapshot: Snapshot) -> list[Rsa]:
    return [*snapshot.rsa.levels, snapshot.rsa.mean]


def _value(rsa: Rsa, measure: str) -> float | None:
    return rsa.pearson if measure == "pearson" else rsa.spearman


def _rsa_bar(axes: Any, place: float, colour: Any, snapshot: Snapshot, measure: str) -> None:
    mean = _value(snapshot.rsa.mean, measure)
    if mean is None:
        axes.annotate(
            "undefined", (0, place), (5, 0), textcoords="offset points",
            va="center", style="italic", color="#666666",
        )  # fmt: skip
        return
    before = snapshot.state == BEFORE
    axes.barh(
        place, mean, 0.66, color="none" if before else colour, edgecolor=colour,
        hatch="////" if before else None, linewidth=1.2,
    )  # fmt: skip
    levels = [_value(level, measure) for level in snapshot.rsa.levels]
    for level, value in enumerate(levels):
        if value is not None:
            # Level below level, so that equal values do not hide each other.
            height = place + 0.46 * (level - (len(levels) - 1) / 2) / max(1, len(levels) - 1)
            axes.text(
                value, height, str(level + 1), ha="center", va="center", fontsize=7,
                bbox={"boxstyle": "circle,pad=0.15", "fc": "white", "ec": colour, "lw": 0.9},
            )  # fmt: skip
    # In a column of its own: beside a level's mark it would be read as that level's.
    axes.text(
        0.99, place, f"mean {mean:.2f}", transform=axes.get_yaxis_transform(), ha="right",
        va="center", fontsize=9,
    )  # fmt: skip


def _mark_groups(axes: Any, arm: ArmFigures) -> None:
    """Lines between text and the levels, and their names on both axes."""
    sizes = [("text", len(arm.sample.text_ids))] + [
        (f"level {level + 1}", len(list(codes)))
        for level, codes in groupby(arm.sample.codes, key=lambda code: code[0])
    ]
    sizes = [(name, size) for name, size in sizes if size]
    ends = np.cumsum([size for _, size in sizes])
    middles = [end - (size + 1) / 2 for end, (_, size) in zip(ends, sizes, strict=True)]
    names = [name for name, _ in sizes]
    axes.set_xticks(middles, names, fontsize=9)
    axes.set_yticks(middles, names, fontsize=9, rotation=90, va="center")
    axes.tick_params(length=0)
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color="black", linewidth=0.7)
        axes.axvline(end - 0.5, color="black", linewidth=0.7)


def _block_means(cosine: Doubles, text: int) -> str:
    """Mean of each block without the diagonal, as a line of text."""
    parts = []
    for name, block in (("text", cosine[:text, :text]), ("SID", cosine[text:, text:])):
        size = len(block)
        if size > 1:
            mean = (block.sum() - size) / (size * (size - 1))
            parts.append(f"{name} {mean:.2f}")
    if 0 < text < len(cosine):
        parts.insert(1, f"text to SID {cosine[:text, text:].mean():.2f}")
    return "means: " + ", ".join(parts)


def _place_words(figure: Figure, axes: Any, snapshot: Snapshot, words: Sequence[str]) -> None:
    """Labels beside their points, most frequent words first.

    A label that would cover another label or another point everywhere is left out.
    """
    canvas: Any = figure.canvas
    renderer = canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    points = axes.transData.transform(
        np.concatenate([snapshot.word_points, snapshot.sid_points]).reshape(-1, 2)
    )
    taken: list[Any] = []
    for number, word in enumerate(words):
        others = np.delete(points, number, axis=0)
        for offset, across, along in _PLACES:
            label = axes.annotate(
                word, snapshot.word_points[number], offset, textcoords="offset points",
                fontsize=8, ha=across, va=along, color="#333333",
            )  # fmt: skip
            box = label.get_window_extent(renderer)
            low, high = (box.x0, box.y0), (box.x1, box.y1)
            inside = frame.contains(*low) and frame.contains(*high)
            covers = bool(((others > low) & (others < high)).all(axis=1).any())
            if inside and not covers and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            label.remove()


def _grid(diagnosis: Diagnosis, height: float, *, share: bool = False) -> tuple[Figure, Any]:
    rows, columns = len(panels_of(diagnosis)), len(states_of(diagnosis))
    figure = _figure(0.9 + columns * (_PANEL + 0.3), 0.4 + rows * height)
    axes: Literal["row", "none"] = "row" if share else "none"
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=axes, sharey=axes)


def _cells(diagnosis: Diagnosis, grid: Any) -> Iterator[tuple[Panel, str, Any]]:
    """Panels with their axes; where an arm was not fine-tuned, the place says so."""
    for panel, row in zip(panels_of(diagnosis), grid, strict=True):
        for state, axes in zip(states_of(diagnosis), row, strict=True):
            if panel.side.at(state) is None:
                axes.set_axis_off()
                axes.text(
                    0.5, 0.5, "not fine-tuned", transform=axes.transAxes, ha="center",
                    style="italic", color="#666666",
                )  # fmt: skip
            yield panel, state, axes


def _legend(axes: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend below the axes. Matplotlib drops labels that begin with "_", so they come later."""
    legend = axes.legend(
        handles, [str(number) for number in range(len(labels))], loc="upper left",
        bbox_to_anchor=(0, -0.13), frameon=False, ncols=1 if max(map(len, labels)) > 45 else 2,
    )  # fmt: skip
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """This module's style; scripts that the font lacks are drawn as boxes without complaint."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
