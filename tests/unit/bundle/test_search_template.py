"""The search template of a bundle: absent, null, written by an export, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gti_core.bundle import Bundle, load_bundle, materialize, tokenizer_folder
from gti_core.errors import BundleError
from gti_core.pipeline.export import export_bundle
from gti_core.pipeline.finetune import FinetuneOptions, finetune, load_finetuned
from gti_core.pipeline.ground import GroundOptions, ground
from gti_core.pipeline.tokenize import TokenizeOptions, tokenize
from gti_core.prompts import SearchPrompt
from gti_core.testing import tiny_backbone, tiny_data
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.lora import LoraOptions

SEARCH = SearchPrompt("for", "item", (1, 2), (3,), max_query_tokens=8)


def edited(bundle: Path, target: Path, search: Any) -> Bundle:
    shutil.copytree(bundle, target)
    path = target / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"search": search}))
    return load_bundle(target)


def test_a_bundle_of_old_has_no_search(tiny_bundle: Path) -> None:
    assert "search" not in json.loads((tiny_bundle / "manifest.json").read_text())
    assert load_bundle(tiny_bundle).search is None


def test_null_is_no_search(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = edited(tiny_bundle, tmp_path / "b", None)
    assert bundle.search is None
    assert bundle.max_tokens == 3 + 5 * 3


def test_template_is_read(tiny_bundle: Path, tmp_path: Path) -> None:
    assert edited(tiny_bundle, tmp_path / "b", SEARCH.to_json()).search == SEARCH


@pytest.mark.parametrize(
    ("max_query_tokens", "expected"),
    # History: 3 + 5 * 3 = 18. Search: 3 fixed tokens, the query, 3 levels.
    [(8, 18), (12, 18), (13, 19), (64, 70)],
)
def test_the_longer_template_counts(
    tiny_bundle: Path, tmp_path: Path, max_query_tokens: int, expected: int
) -> None:
    search = SEARCH.to_json() | {"max_query_tokens": max_query_tokens}
    assert edited(tiny_bundle, tmp_path / "b", search).max_tokens == expected


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("search/1", "no template but str"),
        ([], "no template but list"),
        (True, "no template but bool"),
        ({}, "unknown search template None"),
        (SEARCH.to_json() | {"template": "search/9"}, "unknown search template 'search/9'"),
        ({"template": "search/1"}, "incomplete"),
        (SEARCH.to_json() | {"after_token_ids": None}, "incomplete"),
        (SEARCH.to_json() | {"max_query_tokens": 0}, "max_query_tokens is 0"),
        # The tiny backbone ends at 15; 16 is the first SID token.
        (SEARCH.to_json() | {"before_token_ids": [1, 16]}, "16 is no token id of the backbone"),
        (SEARCH.to_json() | {"after_token_ids": [-1]}, "-1 is no token id of the backbone"),
    ],
)
def test_a_wrong_template_is_refused(
    tiny_bundle: Path, tmp_path: Path, search: Any, message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        edited(tiny_bundle, tmp_path / "b", search)


def test_from_finetuning_to_the_bundle(tmp_path: Path) -> None:
    backbone = tiny_backbone(tmp_path / "backbone")
    tiny_data().save(tmp_path / "prepared")
    options = TokenizeOptions(sizes=(4, 4, 4), reserve=(0, 0, 3))
    tokenize(tmp_path / "prepared", tmp_path / "tokens", options)
    start = GroundOptions(objective="none", dtype="float32")
    ground(tmp_path / "tokens", tmp_path / "g", start, cache_dir=tmp_path, backbone=backbone)
    for name, tasks in (("plain", ("next",)), ("search", ("next", "search"))):
        tuning = FinetuneOptions(
            dtype="float32",
            tasks=tasks,
            lora=LoraOptions(r=2, alpha=4),
            max_history=6,
            drop=2,
            loop=LoopConfig(epochs=0.2, batch_size=4, warmup=1),
        )
        finetune(tmp_path / "g", tmp_path / name, tuning, cache_dir=tmp_path)
    assert load_finetuned(tmp_path / "plain").search is None
    assert export_bundle(tmp_path / "plain", tmp_path / "b1", name="plain").search is None
    search = load_finetuned(tmp_path / "search").search
    assert search is not None
    bundle = export_bundle(tmp_path / "search", tmp_path / "b2", name="search")
    assert bundle.search == search
    assert "search" not in bundle.manifest["stages"]["finetune"]["figures"]
    assert bundle.prompt.max_history == 6
    # Without a merged model the backbone's folder has the tokenizer.
    assert tokenizer_folder(bundle, tmp_path / "cache") == backbone
    merged = materialize(bundle, tmp_path / "cache")
    assert tokenizer_folder(bundle, tmp_path / "cache") == merged
    assert (merged / "tokenizer.json").is_file()
