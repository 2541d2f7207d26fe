"""``gti export``: a finished fine-tuning becomes a bundle; a bundle becomes a model folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from gti_core.backbone import new_folder, resolve_backbone, sha256_file
from gti_core.bundle import format as layout
from gti_core.bundle.format import Bundle, load_bundle
from gti_core.bundle.histories import HISTORIES, MOST_USERS, sample_histories
from gti_core.bundle.merge import write_merged
from gti_core.data.files import json_lines
from gti_core.errors import PipelineError
from gti_core.files import write_json
from gti_core.pipeline.finetune import Finetuned, load_finetuned
from gti_core.types import JsonDict


def export_bundle(
    finetuned_folder: Path,
    output: Path,
    *,
    name: str,
    join_texts: str | None = None,
    histories: int = MOST_USERS,
) -> Bundle:
    """Write a bundle; the folder appears whole or not at all.

    Args:
        finetuned_folder: folder of ``gti finetune``.
        output: the bundle's folder; must not exist.
        name: name for people.
        join_texts: "movielens-100k" leaves the texts out and joins them from the installed data
            set when the bundle is loaded; None writes them into the bundle. The same goes for
            the histories.
        histories: users whose histories go into the bundle, without their ids, to ground new
            items with and to judge them by; 0 for none.
    """
    if output.exists():
        raise PipelineError(f"{output} exists; a bundle is never overwritten")
    tuned = load_finetuned(finetuned_folder)
    tokens = tuned.grounded.tokens
    with new_folder(output) as folder:
        layout.write_items(folder, tokens.catalog)
        shutil.copyfile(tokens.stage.folder / layout.QUANTIZER, folder / layout.QUANTIZER)
        shutil.copyfile(finetuned_folder / layout.ROWS, folder / layout.ROWS)
        shutil.copyfile(finetuned_folder / layout.ADAPTER, folder / layout.ADAPTER)
        names = list(layout.REQUIRED)
        if join_texts is None:
            layout.write_texts(folder, tokens.catalog)
            names.append(layout.TEXTS)
            if histories:
                sample = sample_histories(tokens.prepared.split, histories)
                (folder / HISTORIES).write_bytes(json_lines(sample))
                names.append(HISTORIES)
        manifest = _manifest(tuned, name, join_texts)
        if histories:
            kind = "file" if join_texts is None else join_texts
            manifest["histories"] = {"kind": kind}
        manifest["files"] = {file: sha256_file(folder / file) for file in names}
        write_json(folder / layout.MANIFEST, manifest)
        # Reads back what was written; a bundle that does not load is not left behind.
        load_bundle(folder)
    return load_bundle(output)


def _manifest(tuned: Finetuned, name: str, join_texts: str | None) -> JsonDict:
    grounded, tokens = tuned.grounded, tuned.grounded.tokens
    return {
        "format": layout.FORMAT,
        "name": name,
        "backbone": grounded.backbone,
        "vocabulary": grounded.vocabulary.to_json(),
        "prompt": tuned.prompt.to_json(),
        "search": None if tuned.search is None else tuned.search.to_json(),
        "score": "sum over levels of the log-softmax over the active SID rows",
        "quantizer": tokens.stage.figures["quantizer"],
        "encoder": {
            "name": tokens.stage.options["encoder"],
            "sha256": tokens.stage.options["encoder_sha256"],
        },
        "tuning": {"mode": tuned.mode, "lora": tuned.stage.options["lora"]},
        "texts": {"kind": "file"} if join_texts is None else {"kind": join_texts},
        "catalog_digest": tokens.catalog.digest,
        "trained_on": {
            "dataset": tokens.prepared.name,
            "split": tokens.prepared.split.kind,
            **tokens.prepared.counts,
        },
        "stages": {
            "tokenize": {"options": tokens.stage.options, "report": tokens.stage.figures["report"]},
            "ground": {
                "options": {k: v for k, v in grounded.stage.options.items() if k != "backbone"},
                "figures": grounded.stage.figures,
            },
            "finetune": {
                "options": tuned.stage.options,
                "figures": {
                    k: v for k, v in tuned.stage.figures.items() if k not in ("prompt", "search")
                },
            },
        },
    }


def export_model(bundle: Bundle, output: Path, *, cache_dir: Path) -> Path:
    """Write a plain Hugging Face folder that stock vLLM loads.

    Raises:
        PipelineError: the folder exists.
    """
    if output.exists():
        raise PipelineError(f"{output} exists; a model folder is never overwritten")
    backbone = resolve_backbone(bundle.manifest["backbone"], cache_dir)
    with new_folder(output) as folder:
        write_merged(bundle, backbone, folder)
    return output
