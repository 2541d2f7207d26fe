"""The service under load: its peak, ten times that, and half an hour.

    python -m bench.load --json load.json [--parts peak,overload,soak] [--soak-minutes 30] [--quick]

It starts `gti serve` by itself, on a free loopback port and in a temporary folder, and lets Locust
ask for random histories:

| part | what |
|---|---|
| peak | closed-loop users, as many as keep the engine full: good answers per second |
| overload | ten times that rate, with deadlines, while items are onboarded and retired |
| soak | four closed-loop users for half an hour, while items are onboarded and retired |

Locust shares the machine with what it measures: its own load is part of the result. Memory is what
each process has for itself (USS), once a second; the slope is fitted after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import math
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

from bench.load import memory, report, tool
from bench.onboarding import FILMS, Changes, made_up
from bench.onboarding_load import Book, Server, ask, caller
from bench.output import load_average, publish
from gti_core.bundle import DEMO_BUNDLE, load_bundle
from gti_core.catalog import ItemCatalog
from gti_core.types import JsonDict

logger = logging.getLogger("bench.load")

TOOLS = tool.ROOT / "runs" / "tools"
HISTORIES = 500
WARM_UP_S = 5.0
OVERLOAD = 10
PER_USER_S = 2.0
"""Seconds between two requests of one user under overload."""
SETTLE_S = 5.0


class Run:
    """The parts, one after the other.

    Args:
        server: a ready one.
        catalog: of its bundle.
        options: of the command line.
        folder: for files.
    """

    def __init__(self, server: Server, catalog: ItemCatalog, options: Any, folder: Path) -> None:
        self._server = server
        self._options = options
        self._folder = folder
        self._program = tool.locust(TOOLS)
        rng = random.Random(0)
        ids = sorted(item.item_id for item in catalog)
        self._histories = [
            rng.sample(ids, min(rng.randint(3, 20), len(ids) - 10)) for _ in range(HISTORIES)
        ]
        films = (film.item(f"film-{number}") for number, film in enumerate(FILMS))
        self._texts: Iterator[JsonDict] = itertools.chain(films, made_up(catalog, seed=1))
        self._book = Book()
        self._grounds = options.engine != "fake"

    async def all(self) -> JsonDict:
        """Every part; the result as JSON."""
        found: JsonDict = {"ready_s": round(await self._server.ready(), 1)}
        if self._grounds:
            await self._server.worker_ready()
        if "peak" in self._options.parts or "overload" in self._options.parts:
            found["peak"] = await self._peak()
        if "overload" in self._options.parts:
            found["overload"] = await self._overload(found["peak"]["good_per_s"])
        if "soak" in self._options.parts:
            found["soak"] = await self._soak()
        return found

    async def _peak(self) -> JsonDict:
        seconds = 10.0 if self._options.quick else 40.0
        samples = await self._ask(users=self._options.users, seconds=seconds)
        found = report.answers(samples, seconds, WARM_UP_S)
        logger.info("peak: %s", found)
        return {"users": self._options.users, **found}

    async def _overload(self, peak: float) -> JsonDict:
        seconds = 15.0 if self._options.quick else 60.0
        rate = OVERLOAD * peak
        users = max(10, math.ceil(rate * PER_USER_S))
        with memory.watched(self._server.pid) as trace:
            async with self._changing(1.0) as changes:
                samples = await self._ask(
                    users=users,
                    seconds=seconds,
                    rate=rate,
                    body={"timeout_ms": self._options.timeout_ms},
                )
        found = report.answers(samples, seconds, WARM_UP_S)
        await asyncio.sleep(SETTLE_S)
        async with caller(self._server.url) as client:
            after = await ask(client, self._histories[0])
            ready = (await client.get("/readyz")).status_code
        result = {
            "users": users,
            "rate_per_s": round(rate, 1),
            "deadline_ms": self._options.timeout_ms,
            **found,
            "good_to_peak": round(found["good_per_s"] / peak, 3),
            "changes": changes,
            "memory": memory.summary(trace, WARM_UP_S),
            "after": {"readyz": ready, "status": after.status, "ms": round(after.seconds * 1000)},
        }
        logger.info("overload: %s", result)
        return result

    async def _soak(self) -> JsonDict:
        seconds = 60.0 * self._options.soak_minutes
        with memory.watched(self._server.pid) as trace:
            async with self._changing(self._options.soak_interval) as changes:
                samples = await self._ask(users=4, seconds=seconds)
        warm_up_s = min(300.0, seconds / 3)
        result = {
            **report.answers(samples, seconds),
            "changes": changes,
            "warm_up_s": warm_up_s,
            "memory": memory.summary(trace, warm_up_s),
            "memory_by_minute": _by_minute(trace),
        }
        logger.info("soak: %s", result)
        return result

    async def _ask(self, **how: Any) -> list[tool.Sample]:
        body = {"k": 10} | how.pop("body", {})
        return await asyncio.to_thread(
            tool.run,
            self._program,
            self._folder,
            self._server.url,
            histories=self._histories,
            body=body,
            **how,
        )

    def _changing(self, interval_s: float) -> AbstractAsyncContextManager[JsonDict]:
        if not self._grounds:  # the fake engine has no worker
            return nullcontext({})
        return _Changing(self._server.url, self._book, self._texts, interval_s)


class _Changing:
    """Onboards an item, then retires an older one, over and over while the block runs."""

    def __init__(self, url: str, book: Book, texts: Iterator[JsonDict], interval_s: float) -> None:
        self._url = url
        self._book = book
        self._texts = texts
        self._interval_s = interval_s
        self._seen: JsonDict = {"jobs": {}, "retired": 0, "faults": []}
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> JsonDict:
        self._task = asyncio.create_task(self._change())
        return self._seen

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        assert self._task is not None
        await self._task

    async def _change(self) -> None:
        async with caller(self._url) as client:
            changes = Changes(client, self._book)
            while not self._stop.is_set():
                job = await changes.onboard([next(self._texts)])
                states = self._seen["jobs"]
                states[job["state"]] = states.get(job["state"], 0) + 1
                there = sorted(self._book.view.added - self._book.view.retired)
                if len(there) > 1:
                    got = await client.delete(f"/v1/admin/items/{there[0]}")
                    if got.status_code == 200:
                        self._book.moved(got.json()["version"], retired=[there[0]])
                        self._seen["retired"] += 1
                    else:
                        self._seen["faults"].append(got.text[:200])
                try:
                    async with asyncio.timeout(self._interval_s):
                        await self._stop.wait()
                except TimeoutError:
                    continue


def _by_minute(trace: memory.Trace) -> list[float]:
    """MiB of all processes together, once a minute."""
    found: dict[int, float] = {}
    for at, sizes in trace:
        found.setdefault(int(at // 60), round(sum(sizes.values()), 1))
    return [found[minute] for minute in sorted(found)]


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--parts", default="peak,overload,soak", help="some of these, with commas")
    parser.add_argument("--bundle", type=Path, default=DEMO_BUNDLE, help="default: the demo bundle")
    parser.add_argument("--engine", default="vllm", help="engine of the service")
    parser.add_argument("--users", type=int, default=32, help="closed-loop users of the peak")
    parser.add_argument("--timeout-ms", type=int, default=5000, help="deadline under overload")
    parser.add_argument("--soak-minutes", type=float, default=30.0, help="length of the soak")
    parser.add_argument("--soak-interval", type=float, default=10.0, help="s between its changes")
    parser.add_argument("--quick", action="store_true", help="short parts")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
    load_before = load_average()
    catalog = load_bundle(options.bundle).catalog
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends as well
    with tempfile.TemporaryDirectory(prefix="gti-bench-") as folder:
        server = Server(options.bundle, Path(folder), options.engine)
        try:
            run = Run(server, catalog, options, Path(folder))
            server.begin()
            result = asyncio.run(run.all())
        finally:
            server.end()
    publish("load", arguments, options.json, load_before, **result)


if __name__ == "__main__":
    main()
