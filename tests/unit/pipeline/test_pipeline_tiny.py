"""The pipeline from data to bundle with tiny models; bundles that are wrong are refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from gti_core.bundle import load_bundle, materialize
from gti_core.errors import BundleCorruptError, BundleError, PipelineError
from gti_core.pipeline.evaluate import EvaluateOptions, evaluate, markdown_table
from gti_core.pipeline.export import export_bundle
from gti_core.pipeline.finetune import FinetuneOptions, finetune, load_finetuned, model_of
from gti_core.pipeline.ground import GroundOptions, ground, load_grounded
from gti_core.pipeline.load import bundle_model, load_for_evaluation
from gti_core.pipeline.stage import read_stage
from gti_core.pipeline.tokenize import TokenizeOptions, load_tokens, tokenize
from gti_core.testing import FAMILIES, tiny_backbone, tiny_data
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.lora import LoraOptions

TOKENIZE = TokenizeOptions(sizes=(4, 4, 4), reserve=(0, 0, 3))
GROUND = GroundOptions(dtype="float32", loop=LoopConfig(epochs=1, batch_size=8, rows_lr=0.02))


def tune_options(mode: str = "lora", epochs: float = 2) -> FinetuneOptions:
    return FinetuneOptions(
        mode=mode,
        dtype="float32",
        lora=LoraOptions(r=2, alpha=4),
        max_history=6,
        drop=2,
        loop=LoopConfig(epochs=epochs, batch_size=4, lr=0.01, rows_lr=0.01, warmup=2),
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    tiny_data().save(folder / "prepared")
    tokenize(folder / "prepared", folder / "tokens", TOKENIZE)
    return folder / "tokens"


@pytest.fixture(scope="module")
def bundle_folder(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    tiny_backbone(folder / "backbone")
    ground(tokens, folder / "g", GROUND, cache_dir=folder, backbone=folder / "backbone")
    finetune(folder / "g", folder / "t", tune_options(), cache_dir=folder)
    export_bundle(folder / "t", folder / "bundle", name="tiny")
    return folder / "bundle"


@pytest.mark.parametrize("mode", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_family_from_tokens_to_a_merged_model(family, tied, mode, tokens, tmp_path):
    backbone = tiny_backbone(tmp_path / "backbone", family, tied=tied)
    ground(tokens, tmp_path / "g", GROUND, cache_dir=tmp_path, backbone=backbone)
    finetune(tmp_path / "g", tmp_path / "t", tune_options(mode), cache_dir=tmp_path)
    tuned = load_finetuned(tmp_path / "t")
    lm = model_of(tuned, cache_dir=tmp_path)
    result = evaluate(
        lm,
        tuned.grounded.tokens.catalog,
        tuned.prompt,
        tuned.grounded.tokens.prepared,
        EvaluateOptions(ks=(1, 5), beam_width=8),
    )
    assert result["cases"] == 12
    assert {row["arm"] for row in result["rows"]} >= {"gti", "popularity", "item-knn"}
    assert "recall@5" in markdown_table(result)
    bundle = export_bundle(tmp_path / "t", tmp_path / "bundle", name="tiny")
    folder = materialize(bundle, tmp_path / "cache")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = bundle.prompt.token_ids(
        [item.sid for item in bundle.catalog.items[:3]], bundle.vocabulary
    )
    with torch.no_grad():
        logits = merged(input_ids=torch.tensor([ids])).logits[0, -1, -bundle.vocabulary.rows :]
        expected = lm.sid_logits(lm.hidden(torch.tensor([ids]))[0, -1])
    active = torch.from_numpy(bundle.vocabulary.active_mask.copy())
    assert torch.allclose(logits[active], expected[active], atol=0.1), "within bf16 rounding"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sid = bundle.catalog.items[0].sid
    assert tokenizer.decode(bundle.vocabulary.token_ids(sid)) == "".join(
        bundle.vocabulary.token_text(level, code) for level, code in enumerate(sid)
    )


def test_training_learns_the_cyclic_histories(tokens, tmp_path):
    backbone = tiny_backbone(tmp_path / "backbone")
    ground(tokens, tmp_path / "g", GROUND, cache_dir=tmp_path, backbone=backbone)
    stage = finetune(tmp_path / "g", tmp_path / "t", tune_options(epochs=40), cache_dir=tmp_path)
    assert stage.figures["loss_last"] < 0.5 * stage.figures["loss_first"]
    model = load_for_evaluation(tmp_path / "t", None, cache_dir=tmp_path)
    options = EvaluateOptions(ks=(5,), beam_width=8)
    result = evaluate(model.lm, model.catalog, model.prompt, model.prepared, options)
    recall = {row["arm"]: row["recall@5"] for row in result["rows"]}
    assert recall["gti"] > recall["popularity"]


def test_a_finished_stage_is_not_run_again_and_other_options_are_refused(tokens, tmp_path):
    backbone = tiny_backbone(tmp_path / "backbone")
    first = ground(tokens, tmp_path / "g", GROUND, cache_dir=tmp_path, backbone=backbone)

    def fail(*args):
        raise AssertionError("trained again")

    again = ground(
        tokens, tmp_path / "g", GROUND, cache_dir=tmp_path, backbone=backbone, progress=fail
    )
    assert again.document == first.document
    with pytest.raises(PipelineError, match="another run"):
        ground(
            tokens,
            tmp_path / "g",
            GroundOptions(dtype="float32", initialization="random"),
            cache_dir=tmp_path,
            backbone=backbone,
        )


@pytest.mark.parametrize(
    "options",
    [
        lambda: LoopConfig(epochs=-1),
        lambda: LoopConfig(batch_size=0),
        lambda: LoopConfig(lr=float("nan")),
        lambda: LoopConfig(decay=2),
        lambda: TokenizeOptions(sizes=(0, 8, 8)),
        lambda: TokenizeOptions(sizes=(8, 8), reserve=(0, 0, 1)),
        lambda: TokenizeOptions(quantizer="magic"),
        lambda: EvaluateOptions(limit=-3),
        lambda: EvaluateOptions(batch_size=0),
        lambda: EvaluateOptions(beam_width=3),
        lambda: GroundOptions(objective="magic"),
        lambda: FinetuneOptions(mode="magic"),
        lambda: FinetuneOptions(drop=0),
    ],
)
def test_options_without_sense_are_refused(options):
    with pytest.raises(PipelineError):
        options()


def test_too_few_sids_are_refused_before_any_work(tmp_path):
    tiny_data().save(tmp_path / "p")
    with pytest.raises(PipelineError, match="make 8 SIDs, too few for 24 items"):
        tokenize(tmp_path / "p", tmp_path / "t", TokenizeOptions(sizes=(2, 2, 2)))


def test_objective_none_keeps_the_initialization(tokens, tmp_path):
    backbone = tiny_backbone(tmp_path / "backbone")
    options = GroundOptions(objective="none", dtype="float32")
    ground(tokens, tmp_path / "g", options, cache_dir=tmp_path, backbone=backbone)
    rows = load_grounded(tmp_path / "g").rows["rows_in"]
    assert torch.allclose(rows, rows[:1].expand_as(rows))


def test_tokens_are_distinct_and_reserve_is_kept(tokens):
    loaded = load_tokens(tokens)
    assert len({item.sid for item in loaded.catalog}) == 24
    vocabulary = loaded.vocabulary(100)
    assert vocabulary.sizes == (4, 4, 7)
    assert vocabulary.active == (4, 4, 4)


def test_a_stage_that_is_missing_foreign_or_changed_is_named(tokens, tmp_path):
    with pytest.raises(PipelineError, match="no finished stage"):
        load_grounded(tmp_path)
    with pytest.raises(PipelineError, match="written by `gti tokenize`"):
        load_grounded(tokens)
    shutil.copytree(tokens, tmp_path / "changed")
    (tmp_path / "changed" / "items.json").write_text("[]")
    with pytest.raises(PipelineError, match=r"items\.json was changed"):
        read_stage(tmp_path / "changed", "tokenize")


def test_a_bundle_round_trips(bundle_folder, tmp_path):
    bundle = load_bundle(bundle_folder)
    assert bundle.name == "tiny"
    assert len(bundle.catalog) == 24
    assert bundle.catalog.get("i3").title
    assert bundle.catalog.get("i3").attributes["note"] == "line\u2028break\x85"
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in bundle_folder.iterdir())
    assert bundle.prompt.max_history == 6
    assert bundle.max_tokens == len(bundle.prompt.instruction_token_ids) + 21
    assert bundle.quantizer.sizes == (4, 4, 4)
    shutil.copytree(bundle_folder, tmp_path / "copy")
    assert load_bundle(tmp_path / "copy").digest == bundle.digest
    assert bundle_model(bundle, cache_dir=tmp_path).vocabulary == bundle.vocabulary
    first = materialize(bundle, tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert materialize(bundle, tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp, "merged once"
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in first.iterdir())


@pytest.mark.parametrize(
    "name", ["items.json", "rows.safetensors", "adapter.safetensors", "quantizer.safetensors"]
)
def test_a_flipped_byte_names_the_file_and_both_digests(name, bundle_folder, tmp_path):
    shutil.copytree(bundle_folder, tmp_path / "b")
    data = bytearray((tmp_path / "b" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "b" / name).write_bytes(data)
    with pytest.raises(BundleCorruptError, match=name) as caught:
        load_bundle(tmp_path / "b")
    assert caught.value.expected != caught.value.actual
    assert caught.value.actual in str(caught.value)


def edited(folder, target, **changes):
    shutil.copytree(folder, target)
    path = target / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return target


def test_broken_manifests_are_refused(bundle_folder, tmp_path):
    with pytest.raises(BundleError, match="not a bundle"):
        load_bundle(tmp_path)
    with pytest.raises(BundleError, match="gti-bundle/9"):
        load_bundle(edited(bundle_folder, tmp_path / "a", format="gti-bundle/9"))
    vocabulary = {"sizes": [4, 4, 7], "active": [4, 4, 1], "first_token_id": 300}
    with pytest.raises(BundleError, match="code not active"):
        load_bundle(edited(bundle_folder, tmp_path / "b", vocabulary=vocabulary))
    with pytest.raises(BundleError, match="names not all"):
        load_bundle(edited(bundle_folder, tmp_path / "c", files={}))
    with pytest.raises(BundleError, match="prompt template"):
        load_bundle(edited(bundle_folder, tmp_path / "d", prompt={"template": "x"}))
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match="not JSON"):
        load_bundle(tmp_path / "e")


def test_a_changed_backbone_is_refused(bundle_folder, tmp_path):
    bundle = load_bundle(bundle_folder)
    other = tiny_backbone(tmp_path / "other", "qwen3")
    manifest = {**bundle.manifest["backbone"], "path": str(other)}
    folder = edited(bundle_folder, tmp_path / "b", backbone=manifest)
    with pytest.raises(BundleError, match="trained on"):
        materialize(load_bundle(folder), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*")), "nothing half made stays behind"
