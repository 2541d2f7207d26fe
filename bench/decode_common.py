"""What `bench.decode` and its peers share: models, prompts, cells, rows."""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gti_core.backbone import demo_backbone, new_folder
from gti_core.bundle import load_bundle, materialize
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import JsonDict
from gti_core.vocabulary import SidVocabulary
from service.engine.base import ServingModel

logger = logging.getLogger(__name__)

RESULTS = 10
HISTORY_ITEMS = 20

Prompts = Callable[[int], list[list[int]]]
"""Makes that many prompts, all of one length, never the same twice."""


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        width: beam width.
        concurrency: requests under way at a time.
        requests: requests measured.
    """

    width: int
    concurrency: int
    requests: int


def synthetic_model(cache_dir: Path) -> tuple[ServingModel, AppendOnlyPrompt]:
    """The demo backbone with 3 x 256 random SID rows and 3,670 random items.

    The time a decode takes does not depend on the rows' values.
    """
    backbone = demo_backbone(cache_dir)
    target = cache_dir / f"bench-{backbone.name}"
    first = int(json.loads((backbone / "config.json").read_text())["vocab_size"])
    vocabulary = SidVocabulary((256, 256, 256), (256, 256, 256), first)
    if not target.is_dir():
        lm: Any = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.bfloat16)
        torch.manual_seed(0)
        lm.resize_token_embeddings(first + vocabulary.rows, mean_resizing=True)
        with new_folder(target) as folder:
            lm.save_pretrained(folder)
    rng = np.random.default_rng(0)
    sids = np.unique(rng.integers(0, 256, size=(4000, 3)), axis=0)
    catalog = ItemCatalog(
        [
            Item(str(row), tuple(int(code) for code in sid))
            for row, sid in enumerate(sids[rng.choice(len(sids), size=3670, replace=False)])
        ]
    )
    prompt = AppendOnlyPrompt("", tuple(range(100, 117)))
    index = ConstraintIndex(catalog.sids)
    return ServingModel(target, vocabulary, catalog, index, prompt.max_tokens(3)), prompt


def bundle_model(path: Path, cache_dir: Path) -> tuple[ServingModel, AppendOnlyPrompt]:
    """The model of a bundle."""
    bundle = load_bundle(path)
    model = ServingModel(
        materialize(bundle, cache_dir),
        bundle.vocabulary,
        bundle.catalog,
        ConstraintIndex(bundle.catalog.sids),
        bundle.max_tokens,
    )
    return model, bundle.prompt


def prompt_maker(model: ServingModel, template: AppendOnlyPrompt) -> Prompts:
    """Prompts with histories of random items, from a fixed seed."""
    rng = np.random.default_rng(1)
    size = min(HISTORY_ITEMS, template.max_history)

    def make(count: int) -> list[list[int]]:
        histories = [
            [model.catalog.items[row].sid for row in rng.integers(0, len(model.catalog), size)]
            for _ in range(count)
        ]
        return [template.token_ids(history, model.vocabulary) for history in histories]

    return make


def row(engine: str, cell: Cell, latencies: list[float], wall: float, **more: Any) -> JsonDict:
    """One result. ``latencies`` in seconds per request, ``wall`` in seconds for all of them."""
    result = {
        "engine": engine,
        "beam_width": cell.width,
        "concurrency": cell.concurrency,
        "requests": len(latencies),
        "p50_ms": round(statistics.median(latencies) * 1000, 1),
        "requests_per_s": round(len(latencies) / wall, 3),
        **more,
    }
    logger.info("%s", json.dumps(result))
    return result
