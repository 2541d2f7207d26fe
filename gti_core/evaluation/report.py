"""From a comparison's rows to its JSON document and its Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from gti_core.evaluation.metrics import Values, metrics_of_ranks, paired_bootstrap
from gti_core.types import JsonDict

REFERENCES = ("mean", "sasrec")
"""Arms that the others are compared with, where they ran."""


def intervals(
    rows: Sequence[JsonDict], ks: Sequence[int], references: Sequence[str] = REFERENCES
) -> list[JsonDict]:
    """Paired bootstrap intervals over users, each arm against the reference arms.

    A user's value is the mean over the seeds that both arms ran: users are resampled, not runs.

    Args:
        rows: with "arm", "seed" and "ranks".
        ks: cut-offs; the smallest two are reported.
        references: arms to compare with.

    Returns:
        {"metric", "arm", "against", "seeds", "difference", "low", "high", "confidence",
        "relative"}; "relative" is the difference as a share of the reference's mean, None when
        that is 0.
    """
    values = _values(rows, ks)
    metrics = [f"{kind}@{k}" for kind in ("recall", "ndcg") for k in sorted(ks)[:2]]
    found: list[JsonDict] = []
    for metric in metrics:
        for reference in references:
            for arm in values:
                if reference not in values or arm == reference:
                    continue
                first, second, seeds = _paired(values[arm], values[reference], metric)
                if not seeds:
                    continue
                interval = paired_bootstrap(first, second)
                base = float(second.mean())
                found.append(
                    {
                        "metric": metric,
                        "arm": arm,
                        "against": reference,
                        "seeds": seeds,
                        **asdict(interval),
                        "relative": interval.difference / base if base else None,
                    }
                )
    return found


def facts_line(result: JsonDict) -> str:
    """What an evaluation's figures depend on, in one line."""
    seen = "seen items excluded" if result["seen_excluded"] else "seen items may come back"
    return (
        f"{result['dataset']}, {result['split']} split, {result['cases']:,} cases, "
        f"{result['items']:,} items, full ranking, {seen}, beam width {result['beam_width']}"
    )


def markdown(result: JsonDict, titles: Mapping[str, str]) -> str:
    """The result as Markdown: metrics per arm (mean over seeds), intervals, times.

    Args:
        result: document of ``gti compare``.
        titles: arm -> name for people.
    """
    rows = result["rows"]
    metrics = [name for name in rows[0] if "@" in name]
    lines = [
        facts_line(result),
        "",
        "| arm | seeds | " + " | ".join(_short(name) for name in metrics) + " |",
        "|---|---|" + "---|" * len(metrics),
    ]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    best = {name: max(_mean(rows, arm, name) for arm in arms) for name in metrics}
    for arm in arms:
        cells = []
        for name in metrics:
            value = _mean(rows, arm, name)
            text = f"{value:.4f}"
            cells.append(f"**{text}**" if value == best[name] else text)
        seeds = sum(row["arm"] == arm for row in rows)
        lines.append(f"| {titles[arm]} | {seeds} | " + " | ".join(cells) + " |")
    lines += ["", "| metric | arm | against | difference | 95 % interval | relative |"]
    lines.append("|---|---|---|---|---|---|")
    for entry in result["intervals"]:
        relative = "" if entry["relative"] is None else f"{entry['relative']:+.1%}"
        lines.append(
            f"| {_short(entry['metric'])} | {titles[entry['arm']]} | {titles[entry['against']]} "
            f"| {entry['difference']:+.4f} | {entry['low']:+.4f} to {entry['high']:+.4f} "
            f"| {relative} |"
        )
    lines += ["", "| arm | seed | grounding | fine-tuning | grounding's share | ranking |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        total = row["ground_s"] + row["train_s"]
        share = f"{row['ground_s'] / total:.1%}" if total and row["ground_s"] else "-"
        lines.append(
            f"| {titles[row['arm']]} | {row['seed']} | {row['ground_s']:,.0f} s "
            f"| {row['train_s']:,.0f} s | {share} | {row['decode_s']:,.0f} s |"
        )
    return "\n".join(lines) + "\n"


def _short(metric: str) -> str:
    kind, _, k = metric.partition("@")
    return f"{'R' if kind == 'recall' else 'N'}@{k}"


def _mean(rows: Sequence[JsonDict], arm: str, metric: str) -> float:
    return float(np.mean([row[metric] for row in rows if row["arm"] == arm]))


def _values(rows: Sequence[JsonDict], ks: Sequence[int]) -> dict[str, dict[int, dict[str, Values]]]:
    """arm -> seed -> metric -> value per case."""
    values: dict[str, dict[int, dict[str, Values]]] = {}
    for row in rows:
        ranks = np.array(row["ranks"], dtype=np.int64)
        values.setdefault(row["arm"], {})[row["seed"]] = metrics_of_ranks(ranks, ks)
    return values


def _paired(
    first: Mapping[int, Mapping[str, Values]],
    second: Mapping[int, Mapping[str, Values]],
    metric: str,
) -> tuple[Values, Values, list[int]]:
    """Both arms' values per case, averaged over the seeds that both ran, and those seeds."""
    seeds = sorted(set(first) & set(second))

    def average(runs: Mapping[int, Mapping[str, Values]]) -> Values:
        mean: Values = np.mean([runs[seed][metric] for seed in seeds], axis=0)
        return mean

    return (average(first), average(second), seeds) if seeds else (np.empty(0), np.empty(0), [])
