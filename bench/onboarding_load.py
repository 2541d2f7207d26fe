"""What `bench.onboarding_service` asks with and judges by: a server, its load, its versions.

Every moment is of `time.perf_counter`, in seconds. What an answer should hold is known here from
the changes alone: `Book` keeps which items each version has lost and gained.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import httpx

from gti_core.types import ItemId, JsonDict

K = 10
LEAST_HISTORY, MOST_HISTORY = 3, 20
NEW_IN_HISTORY = 0.25
START_S = 900.0
END_S = 60.0
CALL_S = 120.0
FAILED_PAUSE_S = 0.1

now = time.perf_counter


@dataclass(frozen=True)
class Answer:
    """One call for recommendations.

    Args:
        history: what was asked.
        began: when it was sent.
        ended: when the answer was there.
        status: of HTTP, 0 without an answer.
        version: that answered.
        items: id and score, best first.
        unknown: ids of the history that the version did not know.
        fault: what was answered instead of 200.
    """

    history: tuple[ItemId, ...]
    began: float
    ended: float
    status: int
    version: int = 0
    items: tuple[tuple[ItemId, float], ...] = ()
    unknown: tuple[ItemId, ...] = ()
    fault: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is anything but 200."""
        return self.status != 200

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began

    def rank(self, item_id: ItemId) -> int | None:
        """Place of an item, from 1."""
        ids = [name for name, _ in self.items]
        return ids.index(item_id) + 1 if item_id in ids else None


@dataclass(frozen=True)
class Publish:
    """A change of the version served.

    Args:
        kind: of change.
        version: served since.
        asked: when the change was asked for.
        began: from when on the version may have been served.
        ended: since when it was served for certain.
    """

    kind: str
    version: int
    asked: float
    began: float
    ended: float


@dataclass(frozen=True)
class View:
    """Items that a version does not serve, and items that the bundle does not have."""

    retired: frozenset[ItemId] = frozenset()
    added: frozenset[ItemId] = frozenset()


@dataclass
class Book:
    """What each version of one store serves, by the changes that were asked for."""

    current: int = 1
    views: dict[int, View] = field(default_factory=lambda: {1: View()})

    @property
    def view(self) -> View:
        """Of the current version."""
        return self.views[self.current]

    def moved(
        self,
        version: int,
        *,
        retired: Sequence[ItemId] = (),
        restored: Sequence[ItemId] = (),
        added: Sequence[ItemId] = (),
    ) -> None:
        """A new version, made from the current one, is current."""
        before = self.view
        self.views[version] = View(
            before.retired.union(retired).difference(restored), before.added.union(added)
        )
        self.current = version


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least a share of them do not exceed; nan of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def middle_and_most(values: Sequence[float | None]) -> JsonDict:
    """How many values there are, their median and the largest one."""
    found = [value for value in values if value is not None]
    if not found:
        return {"count": 0, "median": None, "max": None}
    return {"count": len(found), "median": round(median(found), 2), "max": round(max(found), 2)}


def latencies(answers: Sequence[Answer]) -> JsonDict:
    """Count, failures and percentiles of the time that the others took."""
    seconds = [answer.seconds for answer in answers if not answer.failed]
    found: JsonDict = {"requests": len(answers), "failed": len(answers) - len(seconds)}
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0)):
        found[name] = round(percentile(seconds, share) * 1000, 1) if seconds else None
    return found


def overlapping(
    answers: Sequence[Answer], intervals: Sequence[tuple[float, float]]
) -> list[Answer]:
    """Answers that were under way at some moment of an interval."""
    return [
        answer
        for answer in answers
        if any(answer.began < end and begin < answer.ended for begin, end in intervals)
    ]


def allowed_versions(answer: Answer, publishes: Sequence[Publish], first: int) -> set[int]:
    """Versions that may have answered: the last one before it began, and those published since.

    Args:
        answer: the answer.
        publishes: in order of time, none within another.
        first: the version before all of them.
    """
    before, during = first, set()
    for change in publishes:
        if change.ended <= answer.began:
            before = change.version
        elif change.began < answer.ended:
            during.add(change.version)
    return {before, *during}


def faults_of(answer: Answer, book: Book, base: frozenset[ItemId]) -> list[str]:
    """What an answer holds that its version does not have, and the other way round."""
    view = book.views.get(answer.version)
    if view is None:
        return [f"version {answer.version} was never published"]
    served = {item_id for item_id, _ in answer.items}
    faults = []
    if gone := served & view.retired:
        faults.append(f"version {answer.version} has retired {sorted(gone)}")
    if foreign := served - base - view.added:
        faults.append(f"version {answer.version} does not have {sorted(foreign)}")
    if again := served.intersection(answer.history):
        faults.append(f"{sorted(again)} stand in the history")
    count = min(K, len(base.union(view.added).difference(view.retired, answer.history)))
    if len(served) != len(answer.items) or len(served) != count:
        faults.append(f"{len(served)} items instead of {count}")
    unknown = {name for name in answer.history if name not in base and name not in view.added}
    if unknown != set(answer.unknown):
        faults.append(f"unknown are {sorted(unknown)}, not {sorted(answer.unknown)}")
    return faults


Sameness = Literal["equal", "close", "tied", "different"]


def compare(before: Answer, after: Answer, tolerance: float) -> Sameness:
    """How much alike two answers to one request are.

    equal: the same items and scores. close: the same items in the same order, scores within the
    tolerance. tied: not so, but only items change places whose scores are that near to each other,
    the end of the list included. different: all else, another version included.
    """
    if before.failed or after.failed or before.version != after.version:
        return "different"
    if len(before.items) != len(after.items):
        return "different"
    if before.items == after.items:
        return "equal"
    places = list(zip(before.items, after.items, strict=True))
    if any(abs(old - new) > tolerance for (_, old), (_, new) in places):
        return "different"
    if all(old == new for (old, _), (new, _) in places):
        return "close"
    olds, news = dict(before.items), dict(after.items)
    for name in olds.keys() | news.keys():
        # An item of one list only can have lost its place at the end, to a score as good.
        old, new = olds.get(name, after.items[-1][1]), news.get(name, before.items[-1][1])
        if abs(old - new) > tolerance:
            return "different"
    return "tied"


def largest_move(before: Answer, after: Answer) -> float:
    """Largest difference of an item's scores in two answers."""
    olds = dict(before.items)
    return max((abs(olds[i] - score) for i, score in after.items if i in olds), default=0.0)


class Server:
    """`gti serve` as a process of its own, on a free loopback port.

    Args:
        bundle: folder of the bundle.
        folder: where it may write; caches are shared by all starts, stores are not.
        engine: of the service.
    """

    def __init__(self, bundle: Path, folder: Path, engine: str = "vllm") -> None:
        self._bundle = bundle
        self._folder = folder
        self._engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.url = ""
        self.began = 0.0
        self.book = Book()

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def begin(self) -> None:
        """Start the process, with a store of its own."""
        self._starts += 1
        self.book = Book()
        command = [str(Path(sys.executable).with_name("gti")), "serve", "--port", "0"]
        command += ["--bundle", str(self._bundle), "--engine", self._engine]
        command += ["--data-dir", str(self._folder / "data")]
        command += ["--store", str(self._folder / f"store-{self._starts}.db")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GTI_")}
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # as `make run` sets them
        self.began = now()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=kept | quiet
            )

    async def ready(self) -> float:
        """Wait until it serves; returns the seconds since its start."""
        self.url = (await self.said(r"listening on (http://\S+);")).group(1)
        async with caller(self.url) as client:
            while True:
                self._alive()
                if (await client.get("/readyz")).status_code == 200:
                    return now() - self.began
                await asyncio.sleep(0.1)

    async def worker_ready(self) -> float:
        """Wait until a grounding worker takes jobs; returns the seconds since the start."""
        async with caller(self.url) as client:
            while True:
                self._alive()
                workers = (await client.get("/v1/info")).json()["workers"]
                if workers is not None and workers["ready"]:
                    return now() - self.began
                await asyncio.sleep(0.1)

    async def said(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log."""
        while True:
            found = re.search(pattern, self._log.read_text(encoding="utf-8", errors="replace"))
            if found is not None:
                return found
            self._alive()
            if now() - self.began > START_S:
                raise SystemExit(f"the service did not say {pattern!r} in {START_S:.0f} s")
            await asyncio.sleep(0.1)

    def end(self) -> None:
        """End the process; the worker and the engine end with it."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / f"serve-{self._starts}.log"

    def _alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SystemExit(f"the service ended:\n{tail}")


def caller(url: str) -> httpx.AsyncClient:
    """A client of the service; no proxy of the environment comes between."""
    return httpx.AsyncClient(base_url=url, timeout=CALL_S, trust_env=False)


async def ask(client: httpx.AsyncClient, history: Sequence[ItemId], k: int = K) -> Answer:
    """Ask for recommendations; whatever goes wrong is in the answer."""
    began = now()
    try:
        got = await client.post("/v1/recommendations", json={"history": list(history), "k": k})
    except httpx.HTTPError as error:
        return Answer(tuple(history), began, now(), 0, fault=repr(error))
    ended = now()
    if got.status_code != 200:
        return Answer(tuple(history), began, ended, got.status_code, fault=got.text[:500])
    body = got.json()
    # A score of null is one of a fallback, which these histories never get.
    items = tuple((item["item_id"], float(item["score"] or 0.0)) for item in body["items"])
    unknown = tuple(body["unknown_items"])
    return Answer(tuple(history), began, ended, 200, body["version"], items, unknown)


class Histories:
    """Random histories of the bundle's items; some end with an item that was onboarded."""

    def __init__(self, base: Sequence[ItemId], seed: int) -> None:
        self._base = list(base)
        self._random = random.Random(seed)
        self.added: list[ItemId] = []

    def __call__(self) -> list[ItemId]:
        """The next one."""
        count = min(self._random.randint(LEAST_HISTORY, MOST_HISTORY), len(self._base) - K)
        history = self._random.sample(self._base, max(1, count))
        if self.added and self._random.random() < NEW_IN_HISTORY:
            history.append(self._random.choice(self.added))
        return history


@asynccontextmanager
async def load(
    client: httpx.AsyncClient, histories: Callable[[], Sequence[ItemId]], clients: int
) -> AsyncIterator[list[Answer]]:
    """Closed-loop clients while the block runs: each asks as soon as it has its answer.

    The list grows as answers come, and is whole when the block has been left.
    """
    answers: list[Answer] = []
    stop = asyncio.Event()

    async def one() -> None:
        while not stop.is_set():
            answer = await ask(client, histories())
            answers.append(answer)
            if answer.failed:
                await asyncio.sleep(FAILED_PAUSE_S)  # a service that is gone is not hammered

    tasks = [asyncio.create_task(one()) for _ in range(clients)]
    try:
        yield answers
    finally:
        stop.set()
        await asyncio.gather(*tasks)
