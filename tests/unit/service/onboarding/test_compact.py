"""Compaction: the new bundle is what the version served."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from fake_grounder import delta_for
from safetensors.torch import load_file, save_file

from gti_core.backbone import sha256_file
from gti_core.bundle import load_bundle
from gti_core.bundle.delta import CatalogState, Delta, Rows
from gti_core.bundle.format import ROWS, Bundle
from gti_core.data.dataset import ItemText
from gti_core.errors import BundleError
from gti_core.files import read_json, write_json
from service.context import ServingContext
from service.onboarding.compact import compact_bundle

NEW = (ItemText("n", "New", "Fresh.", {"year": 2026}), ItemText("a1", "Alpha again"))


def base_of(bundle: Bundle) -> CatalogState:
    return CatalogState.of(bundle.catalog, bundle.vocabulary)


def onboarded(state: CatalogState, width: int = 32, *, untied: bool = False) -> CatalogState:
    delta = delta_for(state, NEW, 4)
    assert delta.rows is not None
    numbers = delta.rows.numbers
    values = np.full((len(numbers), width), 0.5, dtype=np.float32)
    rows = Rows(numbers, values, -values if untied else None)
    return state.apply(Delta(delta.vocabulary, delta.added, rows=rows))


def test_a_compacted_bundle_holds_the_items_and_rows_of_the_version(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny_bundle)
    state = onboarded(base_of(bundle))
    made = compact_bundle(bundle, 2, state, tmp_path / "out")
    assert made.digest != bundle.digest
    assert made.vocabulary.active == (4, 3, 6)
    assert len(made.catalog) == 13  # the old row of a1 is gone
    found = {item.item_id: item for item in made.catalog}
    assert found["n"].attributes == {"year": 2026}
    assert (found["a1"].title, found["a1"].sid) == ("Alpha again", (0, 0, 5))
    before, after = bundle.rows()["rows_in"], made.rows()["rows_in"]
    assert (after[[13, 14]] == 0.5).all()
    assert (after[:13] == before[:13]).all()
    assert made.manifest["compacted_from"] == {"bundle": bundle.digest, "version": 2}
    assert made.manifest["catalog_digest"] == made.catalog.digest
    assert len(ServingContext.from_bundle(made).catalog) == 13


def test_a_bundle_does_not_know_items_out_of_service(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    state = base_of(bundle).apply(Delta(bundle.vocabulary, retired=("a1", "50")))
    with pytest.raises(BundleError, match=r"2 items are out of service.*--drop-retired"):
        compact_bundle(bundle, 2, state, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    made = compact_bundle(bundle, 2, state, tmp_path / "out", drop_retired=True)
    assert len(made.catalog) == 10
    with pytest.raises(BundleError, match="never overwritten"):
        compact_bundle(bundle, 2, state, tmp_path / "out", drop_retired=True)


def test_codes_that_were_skipped_stay_so(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    vocabulary = bundle.vocabulary.skip_to(2, 5)
    state = base_of(bundle).apply(Delta(vocabulary))
    assert compact_bundle(bundle, 2, state, tmp_path / "out").vocabulary == vocabulary


@pytest.fixture
def untied(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    folder = tmp_path / "untied"
    shutil.copytree(tiny_bundle, folder)
    rows = load_file(folder / ROWS)
    save_file(rows | {"rows_out": rows["rows_in"] + 1}, folder / ROWS)
    manifest = read_json(folder / "manifest.json")
    manifest["files"][ROWS] = sha256_file(folder / ROWS)
    write_json(folder / "manifest.json", manifest)
    return load_bundle(folder)


def test_untied_models_have_rows_of_both_kinds(untied: Bundle, tmp_path: Path) -> None:
    state = onboarded(base_of(untied), untied=True)
    rows = compact_bundle(untied, 2, state, tmp_path / "out").rows()
    assert (rows["rows_in"][13] == 0.5).all()
    assert (rows["rows_out"][13] == -0.5).all()


@pytest.mark.parametrize("width", [32, 8])
def test_rows_that_do_not_fit_the_bundle(untied: Bundle, tmp_path: Path, width: int) -> None:
    state = onboarded(base_of(untied), width)
    with pytest.raises(BundleError, match="don't fit rows_"):
        compact_bundle(untied, 2, state, tmp_path / "out")
    assert not (tmp_path / "out").exists()
