"""New items in the running service: how soon they are served, and what publishing does to others.

    python -m bench.onboarding_service --json onboarding-service.json [--quick] [--bundle PATH]

It starts `gti serve` by itself, on a free loopback port and in a temporary folder, and measures

| part | what |
|---|---|
| starts | seconds from the process's start to ready, to the worker ready, to the first item live |
| films | from POST to the job's end and to the first list with the item; quiet, and under load |
| batches | items per second of jobs of several sizes, under load |
| publishing | latencies of a constant load, stretches without and with publishes in turns |
| replay | each version that answered is activated and asked the same again |

Load is made by closed-loop clients with random histories. A batch larger than the reserve is
refused by the service before any work, and reported so. Items that the gate rejects are judged, not
served: both rates are given. "During
publish" are requests that overlap the time from a change's request (of an onboarding: from its
commit) to the moment it is known to be served. Slow requests overlap more often than fast ones,
with anything; so they are compared with "sham" ones: requests of the stretch without publishes that
overlap the same moments of that stretch. Every answer is held against what its version
serves by the changes asked for. A replayed list is "close" when it has the same items in the same
order and scores within the tolerance, "tied" when only near ties change places. bfloat16 moves a
score by up to 0.12 when a prompt is read in other pieces, with nothing published; the lists of
stretches without publishes, replayed as well, show how much and how often in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import math
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from bench.onboarding import FILMS, FIRST, Changes, Film, made_up, sameness, summary, table
from bench.onboarding_load import (
    Answer,
    Histories,
    Publish,
    Server,
    allowed_versions,
    ask,
    caller,
    compare,
    faults_of,
    largest_move,
    latencies,
    load,
    middle_and_most,
    now,
    overlapping,
)
from bench.output import load_average, publish
from gti_core.bundle import DEMO_BUNDLE, load_bundle
from gti_core.catalog import ItemCatalog
from gti_core.types import JsonDict

logger = logging.getLogger(__name__)

SEARCH_K = 50
LISTS_AFTER = 2
REPEATS = {1: 5, 10: 3}
WARM_UP_S = 3.0
SHOWN = 10
CONTROLS = 10


class Run:
    """The parts, one after the other.

    Args:
        server: to be started.
        catalog: of the bundle.
        options: of the command line.
    """

    def __init__(self, server: Server, catalog: ItemCatalog, options: Any) -> None:
        self._server = server
        self._options = options
        self._base = frozenset(item.item_id for item in catalog)
        self._histories = Histories(sorted(self._base), seed=0)
        self._texts = made_up(catalog, seed=0)
        self._starts: list[JsonDict] = []
        self._passed: list[JsonDict] = []
        self._refused: set[str] = set()

    async def all(self) -> JsonDict:
        """Every part; the result as JSON."""
        await self._start()
        found: JsonDict = {}
        if "films" in self._options.parts:
            found["films"] = await self._films_part()
        if "batches" in self._options.parts:
            found["batches"] = await self._batches()
        if "publishing" in self._options.parts:
            if found and not self._options.quick:
                await self._start()
            found["publishing"], groups = await self.publishing()
            found["replay"] = await self.replay(groups)
        return {"starts": self._starts, **found}

    async def _start(self) -> None:
        """A fresh server with a store of its own; the first one also fills the caches."""
        self._server.end()
        self._server.begin()
        start: JsonDict = {"caches": "empty" if not self._starts else "filled"}
        start["ready_s"] = round(await self._server.ready(), 1)
        logger.info("ready after %.1f s", start["ready_s"])
        self._histories.added = []
        async with caller(self._server.url) as client:
            changes = Changes(client, self._server.book)
            worker = asyncio.create_task(self._server.worker_ready())
            # Asked for before the worker is there: the job waits for it.
            job = await changes.onboard([FIRST.item("first")])
            start["rejected_before_first"] = 0
            while job["state"] == "rejected":
                start["rejected_before_first"] += 1
                job = await changes.onboard([next(self._texts)])
            start["first_item"] = job["state"]
            start["first_item_s"] = round(now() - self._server.began, 1)
            start["worker_ready_s"] = round(await worker, 1)
        self._histories.added = sorted(changes.book.view.added)
        self._starts.append(start)
        logger.info("%s", start)

    async def _films_part(self) -> JsonDict:
        quiet, loaded = (FILMS[:3], FILMS[3:5]) if self._options.quick else (FILMS, FILMS)
        found: JsonDict = {"searched_k": SEARCH_K}
        async with caller(self._server.url) as client:
            found["quiet"] = [await self._film(client, film) for film in quiet]
        if not self._options.quick:
            await self._start()  # the same films again, new to it
        async with (
            caller(self._server.url) as client,
            load(client, self._histories, self._options.clients) as answers,
        ):
            found["under_load"] = [await self._film(client, film) for film in loaded]
        found["load"] = latencies(answers)
        for part in ("quiet", "under_load"):
            rows = [row for row in found[part] if row["state"] == "live"]
            found[f"{part}_summary"] = {
                "films": len(found[part]),
                "live": len(rows),
                "rejected": sum(row["state"] == "rejected" for row in found[part]),
                "live_s": middle_and_most([row["live_s"] for row in rows]),
                "in_list_s": middle_and_most([row["in_list_s"] for row in rows]),
            }
        return found

    async def _film(self, client: httpx.AsyncClient, film: Film) -> JsonDict:
        """One film from POST to a list that has it, asked for back to back."""
        changes = Changes(client, self._server.book)
        item = film.item(f"film-{FILMS.index(film)}")
        began = now()
        work = asyncio.create_task(changes.onboard([item]))
        rank = in_list = None
        left = LISTS_AFTER
        while rank is None and left:
            left -= work.done()  # lists begun after the job's end have it or never will
            if work.done() and work.result()["state"] != "live":
                break
            answer = await ask(client, film.history, SEARCH_K)
            rank, in_list = answer.rank(item["item_id"]), answer.ended - began
        job = await work
        if job["state"] == "live" and item not in self._passed:
            self._passed.append(item)
        elif job["state"] != "live":
            self._refused.add(item["item_id"])
        row = {
            "title": film.title,
            "state": job["state"],
            "live_s": round(job["seconds"], 2),
            "in_list_s": None if rank is None or in_list is None else round(in_list, 2),
            "rank": rank,
            "reasons": job["why"],
        }
        logger.info("%s", row)
        return row

    async def _batches(self) -> JsonDict:
        rows = [
            await self._batch(size)
            for size in self._options.batches
            for _ in range(1 if self._options.quick else REPEATS.get(size, 1))
        ]
        return {"rows": rows, "summary": [summary(size, rows) for size in self._options.batches]}

    async def _batch(self, size: int) -> JsonDict:
        """A job of that size under load."""
        async with caller(self._server.url) as client:
            catalog = (await client.get("/v1/info")).json()["catalog"]
        if catalog["codes_left"] < size <= catalog["reserved_codes"][-1]:
            await self._start()
        items = [next(self._texts) for _ in range(size)]
        async with caller(self._server.url) as client:
            changes = Changes(client, self._server.book)
            async with load(client, self._histories, self._options.clients) as answers:
                job = await changes.onboard(items)
        failed = sum(item["passed"] is False for item in job["items"])
        refused = job["state"].startswith("refused")
        live = size - failed if job["state"] == "live" else 0
        row = {
            "size": size,
            "state": job["state"],
            "seconds": round(job["seconds"], 2),
            "items_per_s": None if refused else round(size / job["seconds"], 2),
            "live_per_s": None if refused else round(live / job["seconds"], 2),
            "items_failed": failed,
            "reasons": job["why"][:3],
            "load": latencies(answers),
        }
        logger.info("%s", row)
        return row

    async def publishing(self) -> tuple[JsonDict, dict[str, list[Answer]]]:
        """Stretches without and with publishes; the figures, and the good answers for `replay`."""
        options = self._options
        share = math.ceil(options.publishes / options.pairs)
        stretches: list[JsonDict] = []
        published: list[Publish] = []
        parts: dict[str, list[Answer]] = {"without": [], "with": [], "publish": [], "job": []}
        parts["sham"] = []
        async with caller(self._server.url) as client:
            # Films that the gate let pass, if the store has them not, those not tried, others.
            had = self._server.book.view.added.union(self._refused)
            rest = [film.item(f"film-{number}") for number, film in enumerate(FILMS)]
            ordered = self._passed + [item for item in rest if item not in self._passed]
            films = [item for item in ordered if item["item_id"] not in had]
            texts = itertools.chain(films, self._texts)
            changes = Changes(client, self._server.book, self._histories, texts)
            first = changes.book.current
            async with load(client, self._histories, options.clients):
                await asyncio.sleep(WARM_UP_S)
            for _ in range(options.pairs):
                started = now()
                async with load(client, self._histories, options.clients) as without:
                    await asyncio.sleep(share * options.interval)
                later = now() - started
                async with load(client, self._histories, options.clients) as with_:
                    count = min(share, options.publishes - len(published))
                    made = await changes.publish(count, options.interval, with_)
                published += made
                swaps = overlapping(with_, [(change.began, change.ended) for change in made])
                jobs = overlapping(with_, changes.jobs)
                sham = overlapping(without, [(c.began - later, c.ended - later) for c in made])
                own = dict(zip(parts, (without, with_, swaps, jobs, sham), strict=True))
                for name, those in own.items():
                    parts[name] += those
                stretches.append({"published": len(made), **compared(own)})
                logger.info("%s", stretches[-1])
        answers = [*parts["without"], *parts["with"]]
        failed = [answer for answer in answers if answer.failed]
        good = [answer for answer in answers if not answer.failed]
        faults = [fault for a in good for fault in faults_of(a, changes.book, self._base)]
        stale = [a for a in good if a.version not in allowed_versions(a, published, first)]
        found = {
            "clients": options.clients,
            "interval_s": options.interval,
            "published": len(published),
            "kinds": dict(Counter(change.kind for change in published)),
            "publish_ms": {
                kind: middle_and_most(
                    [(c.ended - c.asked) * 1000 for c in published if c.kind == kind]
                )
                for kind in sorted({change.kind for change in published})
            },
            "jobs_unpublished": changes.unpublished,
            "admin_faults": changes.faults[:SHOWN],
            "admin_fault_count": len(changes.faults),
            "failed_calls": len(failed),
            "failures": sorted({f"{a.status} {a.fault}" for a in failed})[:SHOWN],
            "versions_that_answered": len({answer.version for answer in good}),
            "wrong_answers": len(faults),
            "wrong": faults[:SHOWN],
            "of_another_version": len(stale),
            "pooled": compared(parts),
            "stretches": stretches,
        }
        # What overlapped no publish tells how much scores move by themselves.
        swapped = {id(answer) for answer in parts["publish"]}
        groups = {
            "no_publishes": [a for a in parts["without"] if not a.failed],
            "publish": [a for a in parts["publish"] if not a.failed],
            "between": [a for a in parts["with"] if not a.failed and id(a) not in swapped],
        }
        return found, groups

    async def replay(self, groups: dict[str, list[Answer]]) -> JsonDict:
        """Activate every version that answered, and ask some of its requests again, quietly."""
        options = self._options
        chosen: dict[int, list[tuple[str, Answer]]] = {}
        for name, answers in groups.items():
            for version in sorted({answer.version for answer in answers}):
                those = [answer for answer in answers if answer.version == version]
                most = options.replays * (CONTROLS if name == "no_publishes" else 1)
                some = those[:: max(1, len(those) // most)][:most]
                chosen.setdefault(version, []).extend((name, answer) for answer in some)
        results: dict[str, list[tuple[str, float]]] = {name: [] for name in groups}
        bad: list[JsonDict] = []
        async with caller(self._server.url) as client:
            changes = Changes(client, self._server.book)
            for version, asked in sorted(chosen.items()):
                if version != changes.book.current and not await changes.activate(version):
                    bad.append({"version": version, "not_activated": changes.faults[-1]})
                    continue
                for name, before in asked:
                    after = await ask(client, before.history)
                    same = compare(before, after, options.tolerance)
                    faults = faults_of(after, changes.book, self._base)
                    results[name].append((same, largest_move(before, after)))
                    if same == "different" or faults:
                        bad.append({"faults": faults, "before": asdict(before), **asdict(after)})
        return {
            "versions": len(chosen),
            "replayed": sum(len(found) for found in results.values()),
            "tolerance": options.tolerance,
            "violations": len(bad),
            **{name: sameness(found) for name, found in results.items()},
            "violated": bad[:SHOWN],
        }


def ratio(with_: JsonDict, without: JsonDict, name: str) -> float | None:
    """One latency by another."""
    return round(with_[name] / without[name], 3) if with_[name] and without[name] else None


def compared(parts: dict[str, list[Answer]]) -> JsonDict:
    """Latencies of each part, and their ratios to those without publishes."""
    found: JsonDict = {name: latencies(answers) for name, answers in parts.items()}
    for name, other in (("with", "without"), ("job", "without"), ("publish", "sham")):
        found[f"{name}_to_{other}"] = {
            share: ratio(found[name], found[other], f"{share}_ms") for share in ("p50", "p99")
        }
    return found


def add_options(parser: argparse._ActionsContainer) -> None:
    """The run's options, ``--json`` excepted."""
    parser.add_argument("--bundle", type=Path, default=DEMO_BUNDLE, help="default: the demo bundle")
    parser.add_argument("--quick", action="store_true", help="one server, few of everything")
    parser.add_argument(
        "--parts", default="films,batches,publishing", help="some of these, with commas"
    )
    parser.add_argument("--clients", type=int, default=2, help="that ask without a pause")
    parser.add_argument("--batches", default="1,10,100,1000", help="sizes of jobs, with commas")
    parser.add_argument("--publishes", type=int, default=200, help="changes under load")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between them")
    parser.add_argument("--pairs", type=int, default=4, help="of stretches without and with them")
    parser.add_argument("--replays", type=int, default=5, help="requests replayed per version")
    parser.add_argument("--tolerance", type=float, default=0.15, help="of a score, in nats")


def measure(options: argparse.Namespace) -> JsonDict:
    """Start the service, measure every part and end it; the result as JSON."""
    given = argparse.Namespace(**vars(options))
    given.batches = [int(part) for part in options.batches.split(",")]
    if options.quick:
        given.publishes, given.pairs, given.replays = min(20, options.publishes), 2, 2
        given.batches = [size for size in given.batches if size != 100]
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
    catalog = load_bundle(options.bundle).catalog
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends as well
    with tempfile.TemporaryDirectory(prefix="gti-bench-") as folder:
        server = Server(options.bundle, Path(folder))
        try:
            return asyncio.run(Run(server, catalog, given).all())
        finally:
            server.end()


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.onboarding_service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    load_before = load_average()
    result = measure(options)
    publish("onboarding_service", arguments, options.json, load_before, **result)
    print(table(result), file=sys.stderr)


if __name__ == "__main__":
    main()
