"""Compaction: a bundle and the deltas above it become one new bundle."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from gti_core.backbone import new_folder, sha256_file
from gti_core.bundle import format as layout
from gti_core.bundle.delta import CatalogState, Rows
from gti_core.bundle.format import Bundle, load_bundle
from gti_core.catalog import Item, ItemCatalog
from gti_core.errors import BundleError
from gti_core.files import write_json, write_safetensors


def compact_bundle(
    bundle: Bundle, version: int, state: CatalogState, output: Path, *, drop_retired: bool = False
) -> Bundle:
    """Write a bundle that serves what a version serves; the folder appears whole or not at all.

    Superseded rows of the catalogue are left out; their codes stay active, so that scores are the
    same. A bundle knows no items out of service.

    Args:
        bundle: the base.
        version: number of the version.
        state: its state.
        output: the new bundle's folder; must not exist.
        drop_retired: whether items out of service are left out.

    Raises:
        BundleError: the folder exists, or items are out of service and may not be left out.
    """
    if output.exists():
        raise BundleError(f"{output} exists; a bundle is never overwritten")
    items = _items(state, drop_retired)
    with new_folder(output) as folder:
        for name in bundle.manifest["files"]:
            if name not in (layout.ITEMS, layout.ROWS, layout.TEXTS):
                shutil.copyfile(bundle.path / name, folder / name)
        layout.write_items(folder, items)
        layout.write_texts(folder, items)
        _write_rows(bundle, state.rows, folder / layout.ROWS)
        names = sorted({*bundle.manifest["files"], layout.TEXTS})
        write_json(
            folder / layout.MANIFEST,
            bundle.manifest
            | {
                "vocabulary": state.vocabulary.to_json(),
                "texts": {"kind": "file"},
                "catalog_digest": ItemCatalog(items).digest,
                "compacted_from": {"bundle": bundle.digest, "version": version},
                "files": {name: sha256_file(folder / name) for name in names},
            },
        )
        load_bundle(folder)
    return load_bundle(output)


def _items(state: CatalogState, drop_retired: bool) -> list[Item]:
    available = state.index.available
    known = [row for row in range(len(state.catalog)) if row not in state.catalog.superseded]
    retired = sum(1 for row in known if not available[row])
    if retired and not drop_retired:
        raise BundleError(
            f"{retired} items are out of service, which a bundle can't say: leave them out with "
            "--drop-retired, or restore them first"
        )
    items = [state.catalog.items[row] for row in known if available[row]]
    if not items:
        raise BundleError("no item is in service")
    return items


def _write_rows(bundle: Bundle, rows: Rows | None, path: Path) -> None:
    import torch

    tensors = bundle.rows()
    if rows is not None:
        blocks = {"rows_in": rows.rows_in, "rows_out": rows.rows_out}
        for name, tensor in tensors.items():
            block = blocks.get(name)
            if block is None or block.shape[1] != tensor.shape[1]:
                raise BundleError(f"the rows onboarded don't fit {name} of the bundle")
            tensor[torch.from_numpy(rows.numbers)] = torch.from_numpy(
                np.ascontiguousarray(block)
            ).to(tensor.dtype)
    write_safetensors(path, tensors)
