"""The constraint index against a dict trie and STATIC: build, memory, changes, cost per level.

    python -m bench.constraint --json constraint.json [--quick] [--clock cpu] [--static PATH]

Random catalogues of three levels, random log-probabilities, 50 beams, 1 and 10 requests. A level's
time is that of masking and choosing the next beams, model and log-softmax left out; at level 0 a
request has one row, at the others one per beam. All find the same items, which is checked. On a
machine that does other work too, ``--clock cpu`` counts the time that the one thread computes. The
peers:

- ``dict_trie``: nested dicts and a Python loop over the beams, as ``prefix_allowed_tokens_fn``
  works. It changes in place: a request under way sees every change.
- ``static``: STATIC's PyTorch code, https://github.com/youtube/static-constraint-decoding, from
  the folder ``--static`` or wherever Python finds it; left out where it does not. It has no
  filters, and a change is a rebuild.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.output import load_average, publish
from gti_core.decoding.constraint import ConstraintIndex
from gti_core.decoding.device import DeviceIndex, Step, advance, batch_filters, results, start
from gti_core.types import IntArray, JsonDict

logger = logging.getLogger(__name__)

LEVELS = 3
BEAMS = 50
EXCLUDED = 100
REQUESTS = (1, 10)
CHANGES = 15

Trie = dict[int, Any]

Clock = Callable[[], float]
"""Seconds, `time.perf_counter` or `time.thread_time`."""


def catalogue(items: int, codes: int, more: int) -> tuple[IntArray, IntArray]:
    """Distinct uniform random SIDs in random order, and ``more`` that are none of them."""
    rng = np.random.default_rng(0)
    wanted = items + more
    sids = np.empty((0, LEVELS), dtype=np.int32)
    while len(sids) < wanted:
        drawn = rng.integers(0, codes, size=(wanted, LEVELS), dtype=np.int32)
        sids = np.unique(np.concatenate([sids, drawn]), axis=0)
    sids = sids[rng.permutation(len(sids))[:wanted]]
    return sids[:items], sids[items:]


def milliseconds(call: Callable[[], object], clock: Clock) -> float:
    """One call's time."""
    begun = clock()
    call()
    return (clock() - begun) * 1000


def seconds_to(call: Callable[[], Any], clock: Clock) -> tuple[Any, float]:
    """A call's result and its time."""
    gc.collect()
    begun = clock()
    made = call()
    return made, clock() - begun


def repeated(call: Callable[[], Any], repeats: int, clock: Clock) -> tuple[Any, float]:
    """A call's result and the median of its times, ms, the first left out."""
    made = call()
    return made, statistics.median(milliseconds(call, clock) for _ in range(repeats))


def random_logprobs(codes: int) -> Callable[[int, int], Tensor]:
    """Log-probabilities [Q, W, codes] from a fixed seed."""
    generator = torch.Generator().manual_seed(1)

    def make(requests: int, beams: int) -> Tensor:
        return torch.log_softmax(torch.randn(requests, beams, codes, generator=generator), dim=-1)

    return make


def row(
    structure: str, facts: JsonDict, requests: int, level_ms: list[float], found: list[list[int]]
) -> JsonDict:
    """One result. ``found`` are the SIDs of the last request, for `same_items` only."""
    result = {
        "structure": structure,
        **facts,
        "rows": requests * BEAMS,
        "level_ms": [round(value, 3) for value in level_ms],
    }
    logger.info("%s", json.dumps(result))
    return {**result, "found": found}


def same_items(rows: list[JsonDict]) -> list[JsonDict]:
    """The rows without what they found, which must be the same wherever it can be compared."""
    seen: dict[tuple[object, ...], list[list[int]]] = {}
    for one in rows:
        key = tuple(one[name] for name in ("items", "codes", "rows", "excluded"))
        found = one.pop("found")
        if seen.setdefault(key, found) != found:
            raise AssertionError(f"{one['structure']} finds other items than its peers: {key}")
    return rows


def measure_index(
    sids: IntArray, more: IntArray, codes: int, repeats: int, clock: Clock
) -> Iterator[JsonDict]:
    """The index, with nothing excluded and with 100 items excluded per request."""
    index, build_s = seconds_to(lambda: ConstraintIndex(sids), clock)
    rng = np.random.default_rng(2)
    inserts, retires = [], []
    snapshot = index
    for sid in more[:CHANGES]:
        retired = int(rng.integers(0, len(snapshot)))
        begun = clock()
        snapshot = snapshot.inserted(tuple(sid.tolist()))
        between = clock()
        snapshot = snapshot.retired(retired)
        retires.append((clock() - between) * 1000)
        inserts.append((between - begun) * 1000)
    excluded = [rng.integers(0, len(index), EXCLUDED) for _ in range(max(REQUESTS))]
    facts: JsonDict = {
        "items": len(index),
        "codes": codes,
        "build_s": round(build_s, 3),
        "bytes_per_item": round(index.nbytes / len(index), 1),
        "insert_ms": round(statistics.median(inserts), 3),
        "retire_ms": round(statistics.median(retires), 3),
        "insert_1000_ms": round(milliseconds(lambda: index.inserted_many(more), clock), 3),
        "filter_ms": round(repeated(lambda: index.filter(excluded[0]), repeats, clock)[1], 3),
    }
    device = DeviceIndex(index)
    for requests in REQUESTS:
        for count in (0, EXCLUDED):
            filters = batch_filters(
                device, [index.filter(rows[:count]) for rows in excluded[:requests]]
            )
            width = torch.full((requests,), BEAMS)
            beams: Step = start(device, filters)
            logprobs = random_logprobs(codes)
            level_ms = []
            for level in range(LEVELS):
                table = logprobs(requests, beams.lo.shape[1])

                call = partial(
                    advance, device, level, beams.lo, beams.hi, beams.score, table, filters, width
                )
                beams, spent = repeated(partial(call, beam_width=BEAMS), repeats, clock)
                level_ms.append(spent)
            places = index.positions[results(device, beams, BEAMS)[-1].numpy()]
            found = index.sids[places].tolist()
            yield row("gti", {**facts, "excluded": count}, requests, level_ms, found)


def build_trie(sids: IntArray) -> Trie:
    """Nested dicts, one level per code; the last maps to the catalogue row."""
    root: Trie = {}
    for number, sid in enumerate(sids.tolist()):
        insert(root, sid, number)
    return root


def insert(root: Trie, sid: list[int], number: int) -> None:
    """Add an item in place."""
    node = root
    for code in sid[:-1]:
        node = node.setdefault(code, {})
    node[sid[-1]] = number


def retire(root: Trie, sid: list[int]) -> None:
    """Remove an item in place, with the prefixes that it leaves empty."""
    path = [root]
    for code in sid[:-1]:
        path.append(path[-1][code])
    for node, code in zip(reversed(path), reversed(sid), strict=True):
        del node[code]
        if node:
            return


def trie_bytes(node: Trie, small: int = 257) -> int:
    """Bytes of the dicts and of the ints that Python does not keep anyway."""
    total = sys.getsizeof(node)
    for key, value in node.items():
        total += 0 if key < small else sys.getsizeof(key)
        if isinstance(value, dict):
            total += trie_bytes(value)
        else:
            total += 0 if value < small else sys.getsizeof(value)
    return total


def measure_trie(
    sids: IntArray, more: IntArray, codes: int, repeats: int, clock: Clock
) -> Iterator[JsonDict]:
    """Nested dicts, asked once per beam."""
    trie, build_s = seconds_to(lambda: build_trie(sids), clock)
    facts: JsonDict = {
        "items": len(sids),
        "codes": codes,
        "build_s": round(build_s, 3),
        "bytes_per_item": round(trie_bytes(trie) / len(sids), 1),
    }
    changes = more[:CHANGES].tolist()
    inserts = [milliseconds(partial(insert, trie, sid, 0), clock) for sid in changes]
    retires = [milliseconds(partial(retire, trie, sid), clock) for sid in changes]
    facts["insert_ms"] = round(statistics.median(inserts), 4)
    facts["retire_ms"] = round(statistics.median(retires), 4)
    for requests in REQUESTS:
        prefixes: list[list[tuple[int, ...]]] = [[()] for _ in range(requests)]
        score = torch.zeros(requests, 1)
        logprobs = random_logprobs(codes)
        level_ms = []
        for _ in range(LEVELS):
            table = logprobs(requests, len(prefixes[0]))

            call = partial(trie_level, trie, prefixes, score, table)
            (prefixes, score), spent = repeated(call, max(3, repeats // 4), clock)
            level_ms.append(spent)
        found = [list(prefix) for prefix in prefixes[-1]]
        yield row("dict_trie", {**facts, "excluded": 0}, requests, level_ms, found)


def trie_level(
    trie: Trie, prefixes: list[list[tuple[int, ...]]], score: Tensor, logprobs: Tensor
) -> tuple[list[list[tuple[int, ...]]], Tensor]:
    """Mask every row of log-probabilities by its prefix's children, then take the best."""
    mask = torch.full_like(logprobs, -torch.inf)
    for request, beams in enumerate(prefixes):
        for beam, prefix in enumerate(beams):
            node = trie
            for code in prefix:
                node = node.get(code, {})
            mask[request, beam, list(node)] = 0
    total = (logprobs + mask + score[:, :, None]).flatten(1)
    best = total.topk(BEAMS, dim=1)
    codes = logprobs.shape[2]
    following = [
        [(*prefixes[request][place // codes], place % codes) for place in places]
        for request, places in enumerate(best.indices.tolist())
    ]
    return following, best.values


def load_static(folder: Path | None) -> tuple[Any, Any] | None:
    """STATIC's index builder and decoder, or None."""
    if folder:
        sys.path.insert(0, str(folder))
    try:
        builder = importlib.import_module("static_decoding.csr_utils")
        decoder: Any = importlib.import_module("static_decoding.decoding_pt")
    except ImportError:
        if folder:
            raise
        return None
    # The model below hands over log-probabilities; the time is to be the constraint's alone.
    decoder.F = SimpleNamespace(log_softmax=lambda logprobs, dim: logprobs)
    return builder, decoder


def measure_static(
    static: tuple[Any, Any], sids: IntArray, codes: int, repeats: int, clock: Clock
) -> Iterator[JsonDict]:
    """STATIC's loop with a model that notes the time whenever it is asked."""
    builder, decoder = static
    ordered, sort_s = seconds_to(lambda: sids[np.lexsort(sids.T[::-1])], clock)
    arrays, build_s = seconds_to(lambda: builder.build_static_index(ordered, codes), clock)
    packed, pointers, branches, *dense = arrays
    stored = sum(array.nbytes for array in (packed, pointers, *dense))
    facts: JsonDict = {
        "items": len(sids),
        "codes": codes,
        "build_s": round(sort_s + build_s, 3),
        "bytes_per_item": round(stored / len(sids), 1),
        "insert_ms": None,
        "retire_ms": None,
        "excluded": 0,
    }
    packed_csr, indptr = torch.from_numpy(packed), torch.from_numpy(pointers)
    start_mask, dense_mask, dense_states = (torch.from_numpy(array) for array in dense)
    for requests in REQUESTS:
        logprobs = random_logprobs(codes)
        tables = [logprobs(requests, beams).flatten(0, 1) for beams in (1, BEAMS, BEAMS)]
        left, entered, ends = [], [], []

        def model(tokens: Tensor, tables: list[Tensor] = tables) -> Tensor:
            entered.append(clock())  # noqa: B023
            table = tables[(len(entered) - 1) % LEVELS][:, None]  # noqa: B023
            left.append(clock())  # noqa: B023
            return table

        for _ in range(repeats + 1):
            found = decoder.sparse_transition_torch(
                model,
                requests,
                BEAMS,
                min(BEAMS, codes),
                0,
                LEVELS,
                codes,
                branches,
                packed_csr,
                indptr,
                start_mask,
                dense_mask,
                dense_states,
                torch.device("cpu"),
            )
            ends.append(clock())
        level_ms = []
        for level in range(LEVELS):
            stops = ends if level == LEVELS - 1 else entered[level + 1 :: LEVELS]
            spent = [
                (stop - begun) * 1000
                for begun, stop in zip(left[level::LEVELS], stops, strict=True)
            ]
            level_ms.append(statistics.median(spent[1:]))
        yield row("static", facts, requests, level_ms, found[-1].tolist())


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    parser = argparse.ArgumentParser(prog="python -m bench.constraint", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--quick", action="store_true", help="smaller catalogues, fewer repeats")
    parser.add_argument("--static", type=Path, help="folder that holds STATIC's static_decoding")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args(arguments)
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    static = load_static(options.static)
    if static is None:
        logger.warning("static_decoding can't be imported: STATIC is left out")
    cells = [(10_000, 256), (100_000, 256)]
    if not options.quick:
        cells += [(1_000_000, 256), (1_000_000, 8192)]
    repeats = 10 if options.quick else 40
    load = load_average()
    rows: list[JsonDict] = []
    for items, codes in cells:
        sids, more = catalogue(items, codes, 1000)
        rows.extend(measure_index(sids, more, codes, repeats, clock))
        if static:
            rows.extend(measure_static(static, sids, codes, repeats, clock))
        rows.extend(measure_trie(sids, more, codes, repeats, clock))
    publish(
        "constraint",
        arguments,
        options.json,
        load,
        levels=LEVELS,
        beam_width=BEAMS,
        clock=options.clock,
        static=static is not None,
        rows=same_items(rows),
    )


if __name__ == "__main__":
    main()
