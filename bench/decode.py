"""Constrained decoding: vLLM with a request per beam, against transformers ``generate``.

    python -m bench.decode --json decode.json [--quick] [--bundle PATH | --synthetic]

Both decode the same prompts under the same constraint, one after the other, never at once.
``generate`` runs with ``num_beams`` and ``prefix_allowed_tokens_fn``, the way such models are
usually decoded; it takes one request at a time, so it is measured at concurrency 1 only. Every
request has a prompt of its own: a prefix cache can serve the instruction, not the history.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import logging
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gti_core.backbone import demo_backbone, new_folder
from gti_core.bundle import DEMO_BUNDLE, load_bundle, materialize
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import JsonDict
from gti_core.vocabulary import SidVocabulary
from service.engine.base import DecodeRequest, ServingModel
from service.engine.vllm_engine import VllmEngine, VllmOptions

logger = logging.getLogger(__name__)

WIDTHS = (10, 20, 50)
QUICK_WIDTHS = (10,)
CONCURRENT = 8
RESULTS = 10
HISTORY_ITEMS = 20

Prompts = Callable[[int], list[list[int]]]
"""Makes that many prompts, never the same twice."""


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


def row(engine: str, width: int, concurrency: int, latencies: list[float], wall: float) -> JsonDict:
    """One result. ``latencies`` in seconds per request, ``wall`` in seconds for all of them."""
    result = {
        "engine": engine,
        "beam_width": width,
        "concurrency": concurrency,
        "requests": len(latencies),
        "p50_ms": round(statistics.median(latencies) * 1000, 1),
        "requests_per_s": round(len(latencies) / wall, 3),
    }
    logger.info("%s", json.dumps(result))
    return result


def allowed_tokens(model: ServingModel, prompt_length: int) -> Callable[[int, Any], list[int]]:
    """A ``prefix_allowed_tokens_fn`` over a dict from prefix to children."""
    children: dict[tuple[int, ...], list[int]] = {}
    for item in model.catalog:
        tokens = model.vocabulary.token_ids(item.sid)
        for depth, token in enumerate(tokens):
            below = children.setdefault(tuple(tokens[:depth]), [])
            if token not in below:
                below.append(token)

    def allowed(_: int, input_ids: Any) -> list[int]:
        return children[tuple(input_ids[prompt_length:].tolist())]

    return allowed


def measure_generate(
    model: ServingModel, prompts: Prompts, widths: tuple[int, ...], requests: int, dtype: str
) -> list[JsonDict]:
    """transformers ``generate``, one request after the other."""
    lm: Any = AutoModelForCausalLM.from_pretrained(model.model_dir, dtype=getattr(torch, dtype))
    lm.eval()
    lm.generation_config.eos_token_id = None
    lm.generation_config.pad_token_id = 0
    levels = model.index.levels
    results = []
    for width in widths:
        latencies = []
        for number, prompt in enumerate(prompts(requests + 1)):
            allowed = allowed_tokens(model, len(prompt))
            started = time.perf_counter()
            with torch.inference_mode():
                found = lm.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=levels,
                    do_sample=False,
                    num_beams=width,
                    num_return_sequences=min(RESULTS, width),
                    prefix_allowed_tokens_fn=allowed,
                )
            if number:  # the first one warms up
                latencies.append(time.perf_counter() - started)
            assert found.shape == (min(RESULTS, width), len(prompt) + levels)
        results.append(row("transformers", width, 1, latencies, sum(latencies)))
    return results


async def measure_vllm(
    model: ServingModel,
    prompts: Prompts,
    cells: list[tuple[int, int]],
    requests: int,
    options: VllmOptions,
) -> tuple[list[JsonDict], JsonDict]:
    """vLLM with a request per beam; ``cells`` are (beam width, concurrency)."""
    engine = VllmEngine(model, options)
    started = time.perf_counter()
    await engine.start()
    facts = {**engine.info(), "start_s": round(time.perf_counter() - started, 1)}
    results = []
    try:
        for width, concurrency in cells:
            waiting = iter(prompts(max(requests, 2 * concurrency) if concurrency > 1 else requests))
            latencies: list[float] = []

            async def user(waiting: Any, width: int, latencies: list[float]) -> None:
                for prompt in waiting:
                    request = DecodeRequest("bench", prompt, min(RESULTS, width), width)
                    begun = time.perf_counter()
                    found = await engine.decode(request)
                    latencies.append(time.perf_counter() - begun)
                    assert len(found) == request.k

            await user(prompts(1), width, [])
            begun = time.perf_counter()
            await asyncio.gather(*(user(waiting, width, latencies) for _ in range(concurrency)))
            wall = time.perf_counter() - begun
            results.append(row("per_beam", width, concurrency, latencies, wall))
    finally:
        await engine.stop()
    return results, facts


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--quick", action="store_true", help="fewer widths and requests")
    parser.add_argument("--bundle", type=Path, default=DEMO_BUNDLE, help="default: the demo bundle")
    parser.add_argument("--synthetic", action="store_true", help="random SID rows, no bundle")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--cache-dir", type=Path, default=Path(".gti/cache"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    torch.set_num_threads(threads)
    model, template = (
        synthetic_model(options.cache_dir)
        if options.synthetic
        else bundle_model(options.bundle, options.cache_dir)
    )
    prompts = prompt_maker(model, template)
    widths = QUICK_WIDTHS if options.quick else WIDTHS
    requests = 2 if options.quick else 10
    cells = [(width, 1) for width in widths] + [(20, CONCURRENT)]
    rows = measure_generate(model, prompts, widths, requests, options.dtype)
    per_beam, facts = asyncio.run(
        measure_vllm(model, prompts, cells, requests, VllmOptions(dtype=options.dtype))
    )
    result = {
        "benchmark": "decode",
        "command": "python -m bench.decode " + " ".join(arguments or sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {
            "platform": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": threads,
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "model": "synthetic" if options.synthetic else options.bundle.name,
        "dtype": options.dtype,
        "items": len(model.catalog),
        "levels": model.index.levels,
        "prompt_tokens": len(prompts(1)[0]),
        "vllm": facts,
        "rows": rows + per_beam,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
