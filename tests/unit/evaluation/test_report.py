"""A comparison's tables: seeds are averaged, users are paired."""

from __future__ import annotations

import pytest

from gti_core.evaluation.report import intervals, markdown

KS = (1, 2)


def row(arm: str, seed: int, ranks: list[int], **more: float) -> dict[str, object]:
    recall = {f"recall@{k}": sum(0 < r <= k for r in ranks) / len(ranks) for k in KS}
    times = {"ground_s": 0.0, "train_s": 10.0, "decode_s": 1.0}
    return {"arm": arm, "seed": seed, **recall, **times, **more, "ranks": ranks}


ROWS = [
    row("mean", 0, [1, 0, 0, 0]),
    row("mean", 1, [0, 0, 0, 2]),
    row("gti-nll", 0, [1, 1, 2, 0], ground_s=5.0),
    row("gti-nll", 1, [1, 1, 0, 2], ground_s=5.0),
]


def test_differences_are_means_over_users_and_common_seeds():
    found = {(e["metric"], e["arm"]): e for e in intervals(ROWS, KS)}
    entry = found["recall@1", "gti-nll"]
    # Per user: mean (1, 0, 0, 0)/(0, 0, 0, 0), gti (1, 1, 0, 0)/(1, 1, 0, 0).
    assert entry["difference"] == pytest.approx((0.5 + 1 + 0 + 0) / 4)
    assert entry["relative"] == pytest.approx(0.375 / 0.125)
    assert entry["seeds"] == [0, 1]
    assert entry["against"] == "mean"
    assert entry["low"] <= entry["difference"] <= entry["high"]


def test_arms_without_a_common_seed_are_not_compared():
    rows = [row("mean", 0, [1, 0]), row("gti-nll", 1, [1, 1])]
    assert intervals(rows, KS) == []


def test_a_reference_of_zero_has_no_relative_difference():
    rows = [row("mean", 0, [0, 0]), row("gti-nll", 0, [1, 1])]
    assert {e["relative"] for e in intervals(rows, KS)} == {None}


def test_the_table_marks_the_best_and_gives_groundings_share():
    result = {
        "dataset": "tiny", "split": "test", "cases": 4, "items": 9, "seen_excluded": True,
        "beam_width": 5, "rows": ROWS, "intervals": intervals(ROWS, KS),
    }  # fmt: skip
    text = markdown(result, {"mean": "MI", "gti-nll": "GTI"})
    assert "| MI | 2 | 0.1250 | 0.2500 |" in text
    assert "| GTI | 2 | **0.5000** | **0.7500** |" in text
    assert "| GTI | 0 | 5 s | 10 s | 33.3% | 1 s |" in text
    assert "| R@1 | GTI | MI | +0.3750 |" in text
