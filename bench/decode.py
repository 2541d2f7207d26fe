"""Constrained decoding: beams inside vLLM's worker, against three peers in the same run.

    python -m bench.decode --json decode.json [--quick] [--bundle PATH | --synthetic]

| engine | what |
|---|---|
| in_engine | this service's engine: one request, beams inside the worker |
| per_beam | every beam of every level a request of vLLM's public AsyncLLM |
| vllm_beam_search | vLLM's own `LLM.beam_search`, without a constraint |
| transformers | `generate` with `num_beams` and `prefix_allowed_tokens_fn` |

They run one after the other, never at once, on prompts of the same kind: a history of 20 items,
never the same twice, so that a prefix cache can serve the instruction but not the history; rows
with "prefix": "warm" ask again with one more item, as a returning user does. "forward_only_ms" is
the time the model's own forward passes took per request, of prompts and beams, in the same run:
what no decoder could do without.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.decode_common import (
    RESULTS,
    Cell,
    Prompts,
    bundle_model,
    prompt_maker,
    row,
    synthetic_model,
)
from bench.decode_peers import measure_generate, measure_vllm_beam_search
from bench.output import load_average, publish
from gti_core.bundle import DEMO_BUNDLE
from gti_core.types import JsonDict
from service.engine.base import DecodeRequest, ServingModel
from service.engine.vllm_engine import VllmEngine, VllmOptions
from service.engine.vllm_per_beam import VllmPerBeamEngine

WIDTHS = (10, 20, 50, 100)
CONCURRENCIES = (1, 8, 32)
ENGINES = ("in_engine", "per_beam", "vllm_beam_search", "transformers")
KV_CACHE_GIB = 1.0


def cells_for(engine: str, quick: bool, widths: tuple[int, ...]) -> list[Cell]:
    """What is measured of an engine; slow peers get fewer requests."""
    if quick:
        alone = 5 if engine == "in_engine" else 2
        return [Cell(50, 1, alone), Cell(50, 8, 16 if engine == "in_engine" else 8)]
    slow = engine in ("transformers", "vllm_beam_search")
    cells = []
    for width in widths:
        for concurrency in CONCURRENCIES[:2] if slow else CONCURRENCIES:
            requests = max(10 if engine == "in_engine" else 3, concurrency)
            if engine == "in_engine" and concurrency > 1:
                requests = 2 * concurrency
            cells.append(Cell(width, concurrency, requests))
    return cells


async def measure_ours(
    engine: Any, name: str, prompts: Prompts, cells: list[Cell]
) -> tuple[list[JsonDict], JsonDict]:
    """An engine of this service, asked by as many users as a cell's concurrency."""
    started = time.perf_counter()
    await engine.start()
    facts = {**engine.info(), "start_s": round(time.perf_counter() - started, 1)}
    results = []
    try:
        for cell in cells:
            await _ask(engine, iter(prompts(1)), cell.width, [])
            cold = prompts(cell.requests)
            results.append(await _cell(engine, name, cell, cold, "cold"))
            if name == "per_beam" and cell.concurrency > 1:
                continue  # minutes each, for what one user shows as well
            # The same users come back with one more item.
            more = prompts(len(cold))
            warm = [prompt + extra[-3:] for prompt, extra in zip(cold, more, strict=True)]
            results.append(await _cell(engine, name, cell, warm, "warm"))
    finally:
        await engine.stop()
    return results, facts


async def _cell(
    engine: Any, name: str, cell: Cell, prompts: list[list[int]], prefix: str
) -> JsonDict:
    latencies: list[float] = []
    waiting = iter(prompts)
    before = await _seconds(engine)
    begun = time.perf_counter()
    await asyncio.gather(
        *(_ask(engine, waiting, cell.width, latencies) for _ in range(cell.concurrency))
    )
    wall = time.perf_counter() - begun
    spent = {part: value - before[part] for part, value in (await _seconds(engine)).items()}
    more: JsonDict = {"prefix": prefix}
    if spent:
        per_request = 1000 / len(prompts)
        more["forward_only_ms"] = round((spent["prompts"] + spent["beams"]) * per_request, 1)
        more["beams_forward_ms"] = round(spent["beams"] * per_request, 1)
        more["constraint_ms"] = round(spent["constraint"] * per_request, 2)
    return row(name, cell, latencies, wall, **more)


async def _ask(
    engine: Any, waiting: Iterator[list[int]], width: int, latencies: list[float]
) -> None:
    for prompt in waiting:
        request = DecodeRequest(engine.model, "bench", prompt, min(RESULTS, width), width)
        begun = time.perf_counter()
        found = await engine.decode(request)
        latencies.append(time.perf_counter() - begun)
        assert len(found) == request.k


async def _seconds(engine: Any) -> dict[str, float]:
    if not isinstance(engine, VllmEngine):
        return {}
    seconds: dict[str, float] = (await engine.state())["seconds"]
    return seconds


def ratios(rows: list[JsonDict]) -> list[JsonDict]:
    """This engine against each peer, cell by cell, prefixes cold."""
    cold = [one for one in rows if one.get("prefix", "cold") == "cold"]
    cells = {(one["beam_width"], one["concurrency"], one["engine"]): one for one in cold}
    found = []
    for (width, concurrency, engine), peer in cells.items():
        ours = cells.get((width, concurrency, "in_engine"))
        if engine == "in_engine" or ours is None:
            continue
        found.append(
            {
                "against": engine,
                "beam_width": width,
                "concurrency": concurrency,
                "throughput": round(ours["requests_per_s"] / peer["requests_per_s"], 2),
                "latency": round(ours["p50_ms"] / peer["p50_ms"], 3),
            }
        )
    return found


def measure(engine: str, model: ServingModel, prompts: Prompts, options: Any) -> Any:
    """All cells of one engine: rows, and facts about it."""
    cells = cells_for(engine, options.quick, options.widths)
    if engine == "transformers":
        return measure_generate(model, prompts, cells, options.dtype), {}
    if engine == "vllm_beam_search":
        return measure_vllm_beam_search(model, prompts, cells, options.dtype, KV_CACHE_GIB), {}
    kind = VllmEngine if engine == "in_engine" else VllmPerBeamEngine
    vllm = VllmOptions(dtype=options.dtype, kv_cache_gib=KV_CACHE_GIB)
    return asyncio.run(measure_ours(kind(model, vllm), engine, prompts, cells))


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--quick", action="store_true", help="beam width 50 only, few requests")
    parser.add_argument("--engines", default=",".join(ENGINES), help="which, with commas")
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), help="beam widths")
    parser.add_argument("--bundle", type=Path, default=DEMO_BUNDLE, help="default: the demo bundle")
    parser.add_argument("--synthetic", action="store_true", help="random SID rows, no bundle")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--cache-dir", type=Path, default=Path(".gti/cache"))
    options = parser.parse_args(arguments)
    options.widths = tuple(int(part) for part in options.widths.split(","))
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    torch.set_num_threads(threads)
    model, template = (
        synthetic_model(options.cache_dir)
        if options.synthetic
        else bundle_model(options.bundle, options.cache_dir)
    )
    rows: list[JsonDict] = []
    facts: JsonDict = {}
    load = load_average()
    for engine in options.engines.split(","):
        found, facts[engine] = measure(engine, model, prompt_maker(model, template), options)
        rows += found
    publish(
        "decode",
        arguments,
        options.json,
        load,
        model="synthetic" if options.synthetic else options.bundle.name,
        dtype=options.dtype,
        items=len(model.catalog),
        levels=model.index.levels,
        prompt_tokens=len(prompt_maker(model, template)(1)[0]),
        engines=facts,
        rows=rows,
        ratios=ratios(rows),
    )


if __name__ == "__main__":
    main()
