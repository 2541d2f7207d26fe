"""`gti compare` with tiny models: every language-model arm, resumption, what it writes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gti_core.errors import PipelineError
from gti_core.pipeline.arms import LM_ARMS
from gti_core.pipeline.compare import CompareOptions, Comparison, compare
from gti_core.pipeline.evaluate import EvaluateOptions
from gti_core.pipeline.finetune import FinetuneOptions, load_finetuned
from gti_core.pipeline.ground import GroundOptions
from gti_core.pipeline.tokenize import TokenizeOptions, tokenize
from gti_core.testing import tiny_backbone, tiny_data
from gti_core.tuning.config import LoopConfig

KS = (1, 3)
OPTIONS = CompareOptions(
    arms=("popularity", "item-knn", *LM_ARMS),
    ground=GroundOptions(dtype="float32", loop=LoopConfig(epochs=1, batch_size=8, rows_lr=0.02)),
    finetune=FinetuneOptions(
        mode="full",
        dtype="float32",
        max_history=6,
        drop=2,
        loop=LoopConfig(steps=3, batch_size=4, lr=0.01, rows_lr=0.01, warmup=1),
    ),
    evaluate=EvaluateOptions(ks=KS, beam_width=8),
    dtype="float32",
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    tiny_data().save(folder / "prepared")
    tokenize(folder / "prepared", folder / "tokens", TokenizeOptions((4, 4, 4), reserve=(0, 0, 0)))
    return folder / "tokens"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return tiny_backbone(tmp_path_factory.mktemp("backbone") / "b", "qwen3", tied=False)


@pytest.fixture(scope="module")
def ran(tokens, backbone, tmp_path_factory):
    output = tmp_path_factory.mktemp("compare")
    comparison = Comparison(tokens, output, OPTIONS, cache_dir=output, backbone=backbone)
    tables = compare(comparison, json=output / "copy.json", markdown=output / "copy.md")
    return output, tables


def test_the_document_has_a_row_per_arm_with_metrics_and_times(ran):
    output, _ = ran
    result = json.loads((output / "copy.json").read_text())
    assert result == json.loads((output / "results.json").read_text())
    assert [row["arm"] for row in result["rows"]] == list(OPTIONS.arms)
    for row in result["rows"]:
        assert {"seed", "train_s", "ground_s", "decode_s"} < set(row)
        for k in KS:
            assert 0 <= row[f"ndcg@{k}"] <= row[f"recall@{k}"] <= 1
    by_arm = {row["arm"]: row for row in result["rows"]}
    assert all(by_arm[name]["steps"] == 3 for name in LM_ARMS)
    assert by_arm["mean"]["ground_s"] == 0
    assert by_arm["gti-nll"]["ground_steps"] == 6
    assert by_arm["mean"]["effective_rank_before"] == 1.0
    assert by_arm["gti-regression"]["effective_rank_before"] > 2
    assert (result["dataset"], result["cases"], result["items"]) == ("tiny", 12, 24)


def test_arms_are_compared_with_mean_initialization_on_the_same_users(ran):
    output, tables = ran
    entries = json.loads((output / "results.json").read_text())["intervals"]
    found = {(entry["metric"], entry["arm"]) for entry in entries if entry["against"] == "mean"}
    arms = [name for name in OPTIONS.arms if name != "mean"]
    assert found == {(m, a) for m in ("recall@1", "recall@3", "ndcg@1", "ndcg@3") for a in arms}
    for entry in entries:
        assert entry["low"] <= entry["difference"] <= entry["high"]
    assert "GTI (nll) + SFT" in tables
    assert (output / "copy.md").read_text() == tables


def test_arms_share_groundings_and_differ_in_tasks(ran):
    output, _ = ran
    folders = {path.name for path in output.iterdir() if path.name.startswith("grounded-")}
    assert folders == {
        "grounded-mean-none-s0",
        "grounded-random-none-s0",
        "grounded-text-mean-none-s0",
        "grounded-mean-nll-s0",
        "grounded-mean-regression-s0",
        "grounded-mean-whitened-s0",
        "grounded-mean-regression+nll-s0",
    }
    vanilla = load_finetuned(output / "tuned-mean-s0").stage
    multi = load_finetuned(output / "tuned-lc-rec-s0").stage
    assert vanilla.figures["examples_per_epoch"] == 12
    assert multi.figures["examples_per_epoch"] == 12 + 24
    assert multi.options["tasks"] == ["next", "align"]


def test_what_is_done_is_not_done_again(ran, tokens, backbone, monkeypatch):
    output, _ = ran
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/*")}

    def fail(*args, **kwargs):
        raise AssertionError("ranked again")

    monkeypatch.setattr("gti_core.pipeline.compare.rank_targets", fail)
    again = Comparison(tokens, output, OPTIONS, cache_dir=output, backbone=backbone).run()
    assert [row["arm"] for row in again] == list(OPTIONS.arms)
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("*/*")}


def test_another_budget_in_the_same_folder_is_refused(ran, tokens, backbone):
    output, _ = ran
    loop = replace(OPTIONS.finetune.loop, steps=4)
    other = replace(OPTIONS, arms=("mean",), finetune=replace(OPTIONS.finetune, loop=loop))
    with pytest.raises(PipelineError, match="another run"):
        Comparison(tokens, output, other, cache_dir=output, backbone=backbone).run()
    wider = replace(OPTIONS, arms=("mean",), evaluate=EvaluateOptions(ks=KS, beam_width=9))
    with pytest.raises(PipelineError, match="ranked under other options"):
        Comparison(tokens, output, wider, cache_dir=output, backbone=backbone).run()


def test_unknown_and_repeated_arms_are_refused():
    with pytest.raises(PipelineError, match="unknown arm 'mena'; known: popularity"):
        CompareOptions(arms=("mena",))
    with pytest.raises(PipelineError, match="each once"):
        CompareOptions(arms=("mean", "mean"))
    with pytest.raises(PipelineError, match="at least one seed"):
        CompareOptions(seeds=())


def test_seeded_arms_run_once_per_seed_and_the_others_once(tokens, tmp_path):
    options = replace(OPTIONS, arms=("popularity", "mean"), seeds=(3, 5))
    comparison = Comparison(tokens, tmp_path, options, cache_dir=tmp_path)
    assert comparison.runs() == [("popularity", 3), ("mean", 3), ("mean", 5)]
