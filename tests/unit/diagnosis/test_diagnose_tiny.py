"""``gti diagnose`` on tiny models: tied and untied, LoRA and full, and pages with hostile names."""

from __future__ import annotations

import base64
import json
import re
import struct
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gti_core.backbone import sha256_file
from gti_core.diagnosis import report
from gti_core.diagnosis.collect import Arm, collect
from gti_core.diagnosis.figures import AFTER, BEFORE
from gti_core.diagnosis.page import html_page
from gti_core.diagnosis.table import UNDEFINED, markdown_table
from gti_core.errors import DataError, PipelineError
from gti_core.grounding.diagnostics import cosine_matrix, effective_rank
from gti_core.lm import load_backbone
from gti_core.pipeline.finetune import FinetuneOptions, finetune, load_finetuned
from gti_core.pipeline.ground import GroundOptions, ground, load_grounded
from gti_core.pipeline.tokenize import TokenizeOptions, tokenize
from gti_core.testing import tiny_backbone, tiny_data
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.lora import LoraOptions
from service.cli import app

HOSTILE = "<script>alert(1)</script> \"&' $x^{$ _"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Folders: tokens; per tied and untied a grounding, a mean start, LoRA and full tuning."""
    folder = tmp_path_factory.mktemp("diagnose")
    tiny_data().save(folder / "prepared")
    tokenize(
        folder / "prepared", folder / "tokens", TokenizeOptions(sizes=(4, 4, 4), reserve=(0, 0, 3))
    )
    loop = LoopConfig(epochs=1, batch_size=8, lr=0.01, rows_lr=0.02, warmup=1)
    for name, tied in (("tied", True), ("untied", False)):
        backbone = tiny_backbone(folder / name / "backbone", tied=tied)
        for start, objective in (("mean", "none"), ("grounded", "nll")):
            options = GroundOptions(objective=objective, dtype="float32", loop=loop)
            ground(
                folder / "tokens", folder / name / start, options,
                cache_dir=folder, backbone=backbone,
            )  # fmt: skip
        for mode in ("lora", "full"):
            tune = FinetuneOptions(
                mode=mode, dtype="float32", lora=LoraOptions(r=2, alpha=4), max_history=6, drop=2,
                loop=loop,
            )  # fmt: skip
            finetune(folder / name / "grounded", folder / name / mode, tune, cache_dir=folder)
    return folder


@pytest.fixture(scope="module")
def result(work, tmp_path_factory):
    """A whole report over arms of both kinds."""
    output = tmp_path_factory.mktemp("report")
    arms = [
        Arm(HOSTILE, work / "tied" / "lora"),
        Arm("full", work / "untied" / "full"),
        Arm("_mean", work / "tied" / "mean"),
    ]
    return report.diagnose(arms, output, cache_dir=work), output


def only(arms, work):
    return collect(arms, cache_dir=work).arms


def test_figures_are_those_of_the_stored_rows(result, work):
    arm = result[0].arms[0]
    (side,) = arm.sides
    tuned = load_finetuned(work / "tied" / "lora")
    active = torch.from_numpy(tuned.grounded.vocabulary.active_mask.copy())
    for state, rows in ((BEFORE, tuned.grounded.rows), (AFTER, tuned.rows)):
        snapshot = side.at(state)
        assert snapshot.effective_rank == pytest.approx(effective_rank(rows["rows_in"][active]))
        kept = [tuned.grounded.vocabulary.row(level, code) for level, code in arm.sample.codes]
        count = len(arm.sample.text_ids)
        assert snapshot.cosine[count:, count:] == pytest.approx(
            cosine_matrix(rows["rows_in"][kept]).numpy()
        )
    text = load_backbone(work / "tied" / "backbone").get_input_embeddings().weight
    expected = cosine_matrix(text[list(arm.sample.text_ids)]).numpy()
    for snapshot in side.snapshots:
        assert snapshot.cosine[:count, :count] == pytest.approx(expected), "LoRA: text rows stay"


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_full_tuning_shows_its_own_text_rows_on_every_side(kind, work):
    (arm,) = only([Arm("full", work / kind / "full")], work)
    adapter = load_file(work / kind / "full" / "adapter.safetensors")
    names = {"tied": "model.embed_tokens.weight", "input": "model.embed_tokens.weight"}
    assert [side.side for side in arm.sides] == (
        ["tied"] if kind == "tied" else ["input", "output"]
    )
    ids = list(arm.sample.text_ids)
    for side in arm.sides:
        matrix = adapter[names.get(side.side, "lm_head.weight")]
        after = side.at(AFTER).cosine[: len(ids), : len(ids)]
        assert after == pytest.approx(cosine_matrix(matrix[ids]).numpy())
        assert np.abs(after - side.at(BEFORE).cosine[: len(ids), : len(ids)]).max() > 1e-3
    if kind == "untied":
        rows = load_finetuned(work / kind / "full").rows
        # Sizes 4, 4 and 4 with 3 in reserve: the first twelve rows are active.
        expected = [effective_rank(rows[name][:12]) for name in ("rows_in", "rows_out")]
        assert [s.at(AFTER).effective_rank for s in arm.sides] == pytest.approx(expected)


def planted(work, name, rows):
    """A grounding stage with rows of our own."""
    source, folder = work / "tied" / "mean", work / "tied" / name
    folder.mkdir(exist_ok=True)
    save_file({"rows_in": rows}, folder / "rows.safetensors")
    document = json.loads((source / "stage.json").read_text())
    document["files"]["rows.safetensors"] = sha256_file(folder / "rows.safetensors")
    (folder / "stage.json").write_text(json.dumps(document))
    return folder


def test_rows_with_their_codewords_geometry_have_rsa_one(work):
    """Levels, codes, reserved rows and codebooks line up."""
    grounded = load_grounded(work / "tied" / "mean")
    words = np.concatenate(grounded.tokens.quantizer.codebooks)
    # Coordinates in the span of the twelve codewords keep their angles.
    left, values, _ = np.linalg.svd(words, full_matrices=False)
    rows = torch.full_like(grounded.rows["rows_in"], 99.0)
    rows[:12] = 0.0
    rows[:12, :12] = torch.from_numpy(left * values)
    (arm,) = only([Arm("planted", planted(work, "planted", rows))], work)
    (snapshot,) = arm.sides[0].snapshots
    for correlations in (*snapshot.rsa.levels, snapshot.rsa.mean, snapshot.rsa.all):
        assert correlations.pearson == pytest.approx(1.0, abs=1e-4)
        assert correlations.spearman == pytest.approx(1.0, abs=1e-4)


def test_rows_that_are_not_finite_name_their_arm(work):
    rows = torch.zeros(15, 32)
    rows[3, 3] = float("nan")
    with pytest.raises(DataError, match="arm 'bad one': rows hold values that are not finite"):
        only(
            [Arm("good", work / "tied" / "mean"), Arm("bad one", planted(work, "nan", rows))], work
        )


def test_rows_of_zeros_are_drawn(work, tmp_path):
    arms = [Arm("zeros", planted(work, "zeros", torch.zeros(15, 32)))]
    done = report.diagnose(arms, tmp_path, cache_dir=work)
    assert done.arms[0].sides[0].snapshots[0].rsa.mean.pearson is None
    assert (tmp_path / "index.html").is_file()


def test_mean_initialization_is_undefined_and_null_never_nan(result):
    document = json.loads(
        (result[1] / "diagnose.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    mean = document["arms"][2]["sides"][0]["states"]
    assert [state["state"] for state in mean] == [BEFORE]
    assert mean[0]["effective_rank"] == pytest.approx(1.0)
    assert mean[0]["mean_cosine"] == pytest.approx(1.0)
    assert mean[0]["rsa"]["mean"] == {"pearson": None, "spearman": None}
    table = markdown_table(result[0]).splitlines()
    assert table[-1] == f"| _mean | before SFT | 1.0 | 1.000 | {UNDEFINED} | {UNDEFINED} |"
    assert len(table) == 2 + 2 + 4 + 1


def test_all_arms_show_the_same_tokens(result):
    samples = {arm.sample for arm in result[0].arms}
    assert len(samples) == 1
    assert result[0].one_sample
    sample = samples.pop()
    assert [level for level, _ in sample.codes] == [0] * 4 + [1] * 4 + [2] * 4
    assert 0 < len(sample.text_ids) <= 50
    assert {"cup", "red"} & set(sample.words)


def test_the_same_call_gives_the_same_bytes(result, work, tmp_path):
    arms = [Arm(arm.name, folder) for arm, folder in zip(
        result[0].arms, [work / "tied/lora", work / "untied/full", work / "tied/mean"], strict=True
    )]  # fmt: skip
    report.diagnose(arms, tmp_path, cache_dir=work)
    for path in result[1].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


class Reader(HTMLParser):
    """Elements, their attributes, and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone_and_can_be_read_aloud(result):
    page = (result[1] / "index.html").read_text(encoding="utf-8")
    reader = Reader(page)
    assert not re.search(r"https?://|url\(|@import", page)
    tags = [tag for tag, _ in reader.elements]
    assert not {"script", "link", "iframe", "object", "base"} & set(tags)
    for tag, attributes in reader.elements:
        assert not {name for name in attributes if name.startswith("on")}
        assert "href" not in attributes
        if "src" in attributes:
            assert tag == "img"
            assert attributes["src"].startswith("data:image/png;base64,")
    assert ("html", {"lang": "en"}) in reader.elements
    assert tags.count("h1") == tags.count("title") == tags.count("main") == 1
    images = [attributes for tag, attributes in reader.elements if tag == "img"]
    files = {path.read_bytes() for path in result[1].glob("*.png")}
    assert {base64.b64decode(image["src"].partition(",")[2]) for image in images} == files
    assert len(files) == 5
    assert all(len(image["alt"]) > 20 for image in images)
    assert any("effective rank 1.0" in image["alt"] for image in images)


def test_hostile_names_stay_text(result):
    reader = Reader((result[1] / "index.html").read_text(encoding="utf-8"))
    assert HOSTILE in reader.text
    assert any(HOSTILE in attributes.get("alt", "") for _, attributes in reader.elements)
    assert not [tag for tag, _ in reader.elements if tag == "script"]


def test_the_page_says_when_tokens_differ(result, work):
    images = dict.fromkeys(report.FIGURES, b"")
    remark = "compare their figures with care"
    assert remark not in html_page(result[0], images)
    other = collect([Arm("other", work / "tied" / "mean")], cache_dir=work, seed=9)
    both = type(other)(0, (*result[0].arms, *other.arms))
    # Twelve codes and every text token are shown whatever the seed; other levels differ.
    assert both.one_sample
    changed = type(other)(0, (*result[0].arms, type(other.arms[0])(
        **{**vars(other.arms[0]), "levels": (4, 8)}
    )))  # fmt: skip
    assert remark in " ".join(html_page(changed, images).split())


def png_size(data):
    """Width and height."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_pictures_grow_with_the_arms(result, work, tmp_path):
    many = [Arm(f"arm {number} \N{SNOWMAN} 漢", work / "tied" / "mean") for number in range(8)]
    report.diagnose(many, tmp_path, cache_dir=work)
    one_column = png_size((tmp_path / "cosine.png").read_bytes())
    two_columns = png_size((result[1] / "cosine.png").read_bytes())
    assert one_column[0] < two_columns[0]
    assert one_column[1] > two_columns[1], "eight rows against four"


def test_arms_that_can_not_be_shown_together_are_refused(work):
    mean = Arm("a", work / "tied" / "mean")
    with pytest.raises(PipelineError, match="same name"):
        only([mean, mean], work)
    with pytest.raises(PipelineError, match="at least one arm"):
        only([], work)
    with pytest.raises(PipelineError, match="no finished stage"):
        only([Arm("a", work / "nowhere")], work)
    with pytest.raises(PipelineError, match="written by `gti tokenize`"):
        only([Arm("a", work / "tokens")], work)


def test_the_command_prints_the_table_and_writes_the_folder(work, tmp_path):
    output = tmp_path / "new" / "folder"
    done = CliRunner().invoke(
        app,
        ["diagnose", "--output", str(output), "--data-dir", str(tmp_path),
         f"grounded={work / 'tied' / 'lora'}", f"mean={work / 'untied' / 'mean'}"],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    assert re.search(r"\| grounded \| after SFT \| \d+\.\d \|", done.output)
    assert "| mean (output) | before SFT | 1.0 | 1.000 |" in done.output
    assert {path.name for path in output.iterdir()} == {
        "diagnose.json", "index.html", *(f"{name}.png" for name in report.FIGURES),
    }  # fmt: skip
    with pytest.raises(PipelineError, match="NAME=FOLDER"):
        CliRunner().invoke(app, ["diagnose", "-o", str(output), "x"], catch_exceptions=False)
