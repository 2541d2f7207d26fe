"""Onboarding, both claims in one result: how good new items are, and what they cost the service.

    python -m bench.onboarding --json onboarding.json [--only quality|service] \\
        [--data runs/scientific/prepared --work runs/onboarding] [--quick]

The quality run (`bench.onboarding_quality`) needs --data and --work and is skipped without them;
the service run is `bench.onboarding_service`. What the latter onboards, changes and prints stands
here.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from bench.onboarding_load import Answer, Book, Histories, Publish, middle_and_most, now
from bench.output import load_average, publish
from gti_core.catalog import ItemCatalog
from gti_core.types import ItemId, JsonDict

ENDED = ("live", "rejected", "failed", "cancelled")
JOB_POLL_S = 0.2
MOST_FAULTS = 20
CYCLE = (
    "retire", "restore", "retire", "back", "forward", "onboard", "retire", "attributes",
    "back", "retire", "restore",
)  # fmt: skip
"""Kinds of changes, over and over. The one after a "back" without "forward" begins a branch."""

JUDGED = ("live", "rejected")
LABELS = {
    "without": "without publishes",
    "with": "with publishes, all",
    "sham": "  at the same moments",
    "publish": "overlapping a publish",
    "job": "overlapping a job",
}

# Title; genres as MovieLens has them; a fitting history of films that it has.
_FILMS = """
Star Wars: Episode I - The Phantom Menace (1999)|Action Adventure Fantasy Sci-Fi|50 172 181
The Matrix (1999)|Action Sci-Fi Thriller|195 89 62 271 96
Gladiator (2000)|Action Drama|97 203 526 22
Toy Story 2 (1999)|Animation Children's Comedy|71 95 588 1
A Bug's Life (1998)|Animation Children's Comedy|95 71 473 1
Mulan (1998)|Animation Children's|71 596 588 95
Tarzan (1999)|Animation Children's|596 71 95 588
Saving Private Ryan (1998)|Action Drama War|157 188 651 318
The Mummy (1999)|Action Adventure Horror Thriller|210 62 217 174
Notting Hill (1999)|Comedy Romance|739 88 255 70
Runaway Bride (1999)|Comedy Romance|88 70 255 739
Shakespeare in Love (1998)|Comedy Romance|421 83 283 275
American Beauty (1999)|Comedy Drama|340 285 15 64
Fight Club (1999)|Drama|475 179 11 56
The Sixth Sense (1999)|Thriller|402 185 332 11
Scream 3 (2000)|Horror Mystery Thriller|219 288 895
Mission: Impossible 2 (2000)|Action Thriller|117 79 298 405
The World Is Not Enough (1999)|Action Thriller|2 144 300 751
Armageddon (1998)|Action Adventure Sci-Fi Thriller|118 300 28 121
X-Men (2000)|Action Sci-Fi|403 231 68 358
Galaxy Quest (1999)|Adventure Comedy Sci-Fi|227 230 235 222
Deep Blue Sea (1999)|Action Sci-Fi Thriller|343 252 118 234
"""


@dataclass(frozen=True)
class Film:
    """A film newer than the data set."""

    title: str
    genres: tuple[str, ...]
    history: tuple[ItemId, ...]

    def item(self, item_id: ItemId) -> JsonDict:
        """Body of an item, its attributes as those of the demo bundle's films."""
        year = int(self.title[-5:-1])
        attributes = {"year": year, "genres": list(self.genres)}
        return {"item_id": item_id, "title": self.title, "attributes": attributes}


FILMS = tuple(
    Film(title, tuple(genres.split()), tuple(history.split()))
    for title, genres, history in (line.split("|") for line in _FILMS.strip().splitlines())
)

FIRST = Film("Star Trek: Insurrection (1998)", ("Action", "Sci-Fi"), ("227", "230", "222"))
"""Onboarded by every server first; one that the demo bundle's gate is likely to let pass."""


def made_up(catalog: ItemCatalog, seed: int) -> Iterator[JsonDict]:
    """New items without end: half a title and another half, attributes of the first."""
    rng = random.Random(seed)
    known = {item.title for item in catalog}
    for number in itertools.count(1):
        head, tail = rng.sample(catalog.items, 2)
        words, more = (re.sub(r"\(.*?\)", "", item.title).split() for item in (head, tail))
        year = re.search(r"\(\d{4}\)$", head.title)
        halves = [*words[: (len(words) + 1) // 2], *more[len(more) // 2 :]]
        title = " ".join([*halves, *([year.group()] if year else [])])
        if halves and title not in known:
            known.add(title)
            attributes = dict(head.attributes)
            yield {"item_id": f"new-{number}", "title": title, "attributes": attributes}


class Changes:
    """Asks for changes of the catalogue and keeps the book of them. One at a time.

    Args:
        client: of the service.
        book: of the service's store.
        histories: told of new items, if given.
        texts: of items to onboard; without them `publish` onboards none.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        book: Book,
        histories: Histories | None = None,
        texts: Iterator[JsonDict] | None = None,
    ) -> None:
        self._client = client
        self._histories = histories
        self._texts = texts
        self._kinds = itertools.cycle(CYCLE)
        self._random = random.Random(0)
        self.book = book
        self.jobs: list[tuple[float, float]] = []
        """When a job was under way."""
        self.unpublished: list[str] = []
        """Why jobs published nothing: the gate, or the reserve."""
        self.faults: list[str] = []
        """Refused or failed requests: what was asked and what was answered."""

    async def onboard(self, items: Sequence[JsonDict]) -> JsonDict:
        """Onboard items and wait for the job's end.

        Returns the job with ``seconds`` from request to end and ``why``, what spoke against it.
        The state of a refused request begins with "refused" and names the answer's code.
        """
        began = now()
        got = await self._client.post("/v1/admin/items?wait=60", json={"items": list(items)})
        job = got.json()
        if got.status_code not in (200, 202):
            work = f"refused before any work: {got.status_code} {job.get('code')}"
            why = [job.get("detail", got.text)]
            return {"state": work, "seconds": now() - began, "items": [], "why": why}
        while job["state"] not in ENDED:
            await asyncio.sleep(JOB_POLL_S)
            job = (await self._client.get(f"/v1/admin/jobs/{job['job_id']}")).json()
        ended = now()
        self.jobs.append((began, ended))
        why = [reason for item in job["items"] for reason in item["reasons"]] + job["reasons"]
        if job["error"] is not None:
            why.append(job["error"])
        if job["state"] == "live":
            refused = {item["item_id"] for item in job["items"] if item["passed"] is False}
            added = [item["item_id"] for item in items if item["item_id"] not in refused]
            self.book.moved(job["version"], added=added)
            if self._histories is not None:
                self._histories.added += added
        return {**job, "began": began, "ended": ended, "seconds": ended - began, "why": why}

    async def activate(self, version: int, kind: str = "activate") -> Publish | None:
        """Make an earlier or later version current; None when that was refused."""
        change = await self._send(kind, "POST", f"/v1/admin/versions/{version}/activate")
        if change is not None:
            self.book.current = version
        return change

    async def publish(
        self, count: int, interval_s: float, answers: Sequence[Answer]
    ) -> list[Publish]:
        """Publish changes of all kinds, one after another, at an even pace.

        Args:
            count: changes to be published; jobs that the gate rejects do not count.
            interval_s: seconds from one to the next; more where one takes longer.
            answers: of the load; what is retired is taken from the latest one.
        """
        made: list[Publish] = []
        due = now()
        while len(made) < count and len(self.faults) < MOST_FAULTS:
            change = await self._next(next(self._kinds), answers)
            if change is not None:
                made.append(change)
            due = max(due + interval_s, now())
            await asyncio.sleep(due - now())
        return made

    async def _next(self, kind: str, answers: Sequence[Answer]) -> Publish | None:
        view, current = self.book.view, self.book.current
        if kind == "onboard":
            return None if self._texts is None else await self._onboard(next(self._texts))
        others = [version for version in self.book.views if version != current]
        if kind == "back" and others:
            return await self.activate(self._random.choice(others), kind)
        if kind == "forward" and max(others, default=0) > current:
            return await self.activate(max(others), kind)
        if kind == "restore" and view.retired:
            return await self._restore(self._random.choice(sorted(view.retired)))
        shown = [item_id for item_id, _ in answers[-1].items] if answers else []
        names = [item_id for item_id in shown if item_id not in view.retired]
        if not names:
            return None
        path = f"/v1/admin/items/{quote(names[0], safe='')}"
        if kind == "attributes":
            body = {"attributes": {"bench": str(len(self.book.views))}}
            change = await self._send(kind, "PATCH", path, body)
            if change is not None:
                self.book.moved(change.version)
            return change
        change = await self._send("retire", "DELETE", path)
        if change is not None:
            self.book.moved(change.version, retired=[names[0]])
        return change

    async def _restore(self, item_id: ItemId) -> Publish | None:
        path = f"/v1/admin/items/{quote(item_id, safe='')}"
        change = await self._send("restore", "PATCH", path, {"available": True})
        if change is not None:
            self.book.moved(change.version, restored=[item_id])
        return change

    async def _onboard(self, item: JsonDict) -> Publish | None:
        try:
            job = await self.onboard([item])
        except httpx.HTTPError as error:
            self.faults.append(f"POST /v1/admin/items {item}: {error!r}")
            return None
        if job["state"] != "live":
            self.unpublished.append(f"{job['state']}: {'; '.join(job['why'])}")
            return None
        cursor = job["version"] + 1
        page = await self._client.get(f"/v1/admin/versions?limit=1&cursor={cursor}")
        created = datetime.fromisoformat(page.json()["versions"][0]["created_at"])
        # The store has the time of the day.
        commit = created.timestamp() - time.time() + now()
        began = min(max(commit, job["began"]), job["ended"])
        return Publish("onboard", job["version"], job["began"], began, job["ended"])

    async def _send(
        self, kind: str, method: str, path: str, body: JsonDict | None = None
    ) -> Publish | None:
        began = now()
        try:
            got = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            self.faults.append(f"{method} {path} {body}: {error!r}")
            return None
        if got.status_code != 200:
            self.faults.append(f"{method} {path} {body}: {got.status_code} {got.text[:500]}")
            return None
        found = got.json()
        version = found["number"] if "number" in found else found["version"]
        return Publish(kind, version, began, began, now())


def summary(size: int, rows: Sequence[JsonDict]) -> JsonDict:
    """Batches of one size, and items per second: judged, and of those served."""
    those = [row for row in rows if row["size"] == size]
    states = [row["state"] for row in those]
    judged = [row for row in those if row["state"] in JUDGED]
    return {
        "size": size,
        "jobs": len(those),
        **{name: states.count(name) for name in JUDGED},
        "refused": sorted({state for state in states if state.startswith("refused")}) or None,
        "items_failed": sum(row["items_failed"] for row in those),
        "live_items_per_s": middle_and_most([row["live_per_s"] for row in judged])["median"],
        "judged_items_per_s": middle_and_most([row["items_per_s"] for row in judged])["median"],
    }


def sameness(results: Sequence[tuple[str, float]]) -> JsonDict:
    """How many replayed lists are how much alike, and the largest move of a score."""
    kinds = Counter(kind for kind, _ in results)
    return {
        "replayed": len(results),
        **{kind: kinds[kind] for kind in ("equal", "close", "tied", "different")},
        "equal_share": round(kinds["equal"] / len(results), 4) if results else None,
        "largest_move": round(max((move for _, move in results), default=0.0), 4),
    }


def table(result: JsonDict) -> str:
    """The result for people."""
    lines = [f"start: {_words(start)}" for start in result["starts"]]
    if "films" in result:
        lines.append(f"films, quiet: {_words(result['films']['quiet_summary'])}")
        lines.append(f"films, under load: {_words(result['films']['under_load_summary'])}")
    if "batches" in result:
        lines += [f"batch: {_words(row)}" for row in result["batches"]["summary"]]
    if "publishing" not in result:
        return "\n".join(lines)
    publishing = result["publishing"]
    lines.append(
        "latency in ms             requests failed      p50      p99      max     p50x     p99x"
    )
    pooled = publishing["pooled"]
    for name, other in (
        ("without", ""),
        ("sham", ""),
        ("with", "without"),
        ("job", "without"),
        ("publish", "sham"),
    ):
        row = pooled[name]
        by = pooled.get(f"{name}_to_{other}", {"p50": None, "p99": None})
        numbers = [row["p50_ms"], row["p99_ms"], row["max_ms"], by["p50"], by["p99"]]
        cells = " ".join(f"{'-' if number is None else number:>8}" for number in numbers)
        lines.append(f"{LABELS[name]:24} {row['requests']:9} {row['failed']:6} {cells}")
    for name in ("kinds", "publish_ms"):
        lines.append(f"{name}: {_words(publishing[name])}")
    counts = ("published", "failed_calls", "admin_fault_count", "wrong_answers")
    lines.append(_words({name: publishing[name] for name in (*counts, "of_another_version")}))
    for name, value in result["replay"].items():
        if name != "violated":
            lines.append(f"replay, {name}: {_words(value)}")
    return "\n".join(lines)


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return "-" if value is None else str(value)
    parts = {k: f"({_words(v)})" if isinstance(v, dict) else _words(v) for k, v in value.items()}
    return ", ".join(f"{name} {part}" for name, part in parts.items())


def main(arguments: list[str] | None = None) -> None:
    """Entry point; prints the result and writes it to ``--json``."""
    # Late, since the service run imports this module.
    from bench import onboarding_quality, onboarding_service

    parser = argparse.ArgumentParser(
        prog="python -m bench.onboarding",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=["quality", "service"], help="one of the runs")
    parser.add_argument("--json", type=Path, help="file for the result")
    onboarding_quality.add_options(parser.add_argument_group("quality"), required=False)
    onboarding_service.add_options(parser.add_argument_group("service"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    has_data = options.data is not None and options.work is not None
    if options.only == "quality" and not has_data:
        parser.error("the quality run needs --data and --work")
    load = load_average()
    result: dict[str, Any] = {"quality": None, "service": None}
    # The service first: models that the quality run leaves in this process would slow it down.
    if options.only != "quality":
        result["service"] = onboarding_service.measure(options)
    if options.only != "service":
        if has_data:
            result["quality"] = onboarding_quality.measure(options)
        else:
            result["quality"] = {"skipped": "needs --data and --work"}
            print("the quality run is skipped: it needs --data and --work", file=sys.stderr)
    publish("onboarding", arguments, options.json, load, **result)
    if result["service"] is not None:
        print(table(result["service"]), file=sys.stderr)


if __name__ == "__main__":
    main()
