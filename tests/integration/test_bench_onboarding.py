"""The onboarding benches: their arithmetic, and the service run over the fake engine."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli import ROOT, environment

from bench import onboarding, onboarding_quality
from bench.onboarding import FILMS, FIRST, Changes, made_up, summary, table
from bench.onboarding_load import (
    Answer,
    Book,
    Publish,
    Server,
    View,
    allowed_versions,
    ask,
    caller,
    compare,
    faults_of,
    largest_move,
    latencies,
    load,
    middle_and_most,
    overlapping,
    percentile,
)
from bench.onboarding_service import Run, compared
from gti_core.bundle import DEMO_BUNDLE, load_bundle
from gti_core.catalog import ItemCatalog


def answer(began: float = 0.0, ended: float = 1.0, **fields: Any) -> Answer:
    return Answer(**({"history": ("a",), "status": 200} | fields), began=began, ended=ended)


def test_percentiles_are_values_that_were_seen() -> None:
    hundred = [float(value) for value in range(100, 0, -1)]
    assert percentile(hundred, 0.5) == 50
    assert percentile(hundred, 0.99) == 99
    assert percentile(hundred, 1.0) == 100
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7
    assert percentile([1.0, 2.0], 0.99) == 2
    assert math.isnan(percentile([], 0.5))


def test_latencies_leave_failures_out_but_count_them() -> None:
    answers = [answer(0, 0.1), answer(0, 0.3), answer(0, 9, status=503), answer(0, 9, status=0)]
    assert latencies(answers) == {
        "requests": 4, "failed": 2, "p50_ms": 100.0, "p99_ms": 300.0, "max_ms": 300.0
    }  # fmt: skip
    assert latencies(answers[2:])["p50_ms"] is None
    assert middle_and_most([3, None, 1, 2]) == {"count": 3, "median": 2, "max": 3}
    assert middle_and_most([None])["count"] == 0


def test_ratios_are_to_the_stretch_without() -> None:
    parts = {
        "without": [answer(0, 0.2)],
        "with": [answer(0, 0.3)],
        "publish": [answer(0, 0.6)],
        "job": [],
        "sham": [answer(0, 0.4)],
    }
    found = compared(parts)
    assert found["with_to_without"] == {"p50": 1.5, "p99": 1.5}
    assert found["publish_to_sham"] == {"p50": 1.5, "p99": 1.5}
    assert found["job_to_without"] == {"p50": None, "p99": None}


@pytest.mark.parametrize(
    ("began", "ended", "overlaps"),
    [
        (0, 1, False),  # before
        (0, 2, False),  # ends as it begins
        (1, 2.1, True),
        (2.2, 2.8, True),  # within
        (1, 9, True),  # around
        (2.9, 4, True),
        (3, 4, False),
        (4.5, 6, True),  # of the second interval
    ],
)
def test_overlap_of_requests_with_publishes(began: float, ended: float, overlaps: bool) -> None:
    asked = [answer(began, ended)]
    assert overlapping(asked, [(2, 3), (5, 5.5)]) == (asked if overlaps else [])


def test_versions_that_may_answer() -> None:
    publishes = [Publish("retire", 2, 1, 1, 2), Publish("back", 1, 4, 4, 5)]

    def allowed(began: float, ended: float) -> set[int]:
        return allowed_versions(answer(began, ended), publishes, 7)

    assert allowed(0, 0.5) == {7}
    assert allowed(0, 1.5) == {7, 2}
    assert allowed(1.5, 3) == {7, 2}
    assert allowed(2, 3) == {2}  # in force when the answer to the change has come
    assert allowed(3, 4.5) == {2, 1}
    assert allowed(0, 9) == {7, 2, 1}
    assert allowed(6, 9) == {1}


def test_the_book_follows_branches() -> None:
    book = Book()
    book.moved(2, retired=["a"])
    book.moved(3, added=["n"])
    book.moved(4, restored=["a"])
    assert book.view == View(frozenset(), frozenset({"n"}))
    book.current = 2
    book.moved(5)
    assert book.views[5] == View(frozenset({"a"}), frozenset())
    assert book.current == 5


BASE = frozenset({"a", "b", "c"})


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, None),
        ({"version": 9}, "never published"),
        ({"items": (("c", -1.0), ("n", -2.0))}, "has retired ['c']"),
        ({"items": (("b", -1.0), ("x", -2.0))}, "does not have ['x']"),
        ({"items": (("b", -1.0), ("a", -2.0))}, "in the history"),
        ({"items": (("b", -1.0),)}, "1 items instead of 2"),
        ({"items": (("b", -1.0), ("b", -2.0))}, "1 items instead of 2"),
        ({"history": ("a", "x")}, "unknown are ['x'], not []"),
        ({"unknown": ("n",)}, "unknown are [], not ['n']"),
    ],
)
def test_answers_are_held_against_the_book(fields: dict[str, Any], fault: str | None) -> None:
    book = Book()
    book.moved(2, retired=["c"], added=["n"])
    good = {"version": 2, "items": (("b", -1.0), ("n", -2.0))}
    found = faults_of(answer(**(good | fields)), book, BASE)
    assert found == [] if fault is None else any(fault in line for line in found)


OLD = (("a", -1.0), ("b", -1.05), ("c", -3.0))


@pytest.mark.parametrize(
    ("items", "same"),
    [
        (OLD, "equal"),
        ((("a", -1.01), ("b", -1.05), ("c", -3.0)), "close"),
        ((("b", -1.0), ("a", -1.05), ("c", -3.0)), "tied"),
        ((("a", -1.0), ("b", -1.05), ("d", -3.02)), "tied"),  # another at the end of the list
        ((("a", -1.0), ("b", -1.05), ("c", -3.2)), "different"),  # a score has moved
        ((("a", -1.0), ("d", -1.05), ("c", -3.0)), "different"),  # b is gone from the middle
        ((("c", -1.0), ("b", -1.05), ("a", -3.0)), "different"),
        (OLD[:2], "different"),
    ],
)
def test_replayed_lists(items: tuple[tuple[str, float], ...], same: str) -> None:
    before, after = answer(version=3, items=OLD), answer(version=3, items=items)
    assert compare(before, after, 0.1) == same
    assert compare(before, replace(after, version=4), 0.1) == "different"
    assert compare(before, replace(after, status=500), 0.1) == "different"


def test_largest_move_is_of_items_in_both() -> None:
    before = answer(items=(("a", -1.0), ("b", -2.0)))
    assert largest_move(before, answer(items=(("b", -2.5), ("x", -9.0)))) == 0.5
    assert largest_move(before, answer(items=())) == 0


def test_summary_of_batches() -> None:
    row = {
        "size": 10,
        "state": "rejected",
        "items_per_s": 2.0,
        "live_per_s": 0.0,
        "items_failed": 10,
    }
    other = row | {"state": "live", "items_per_s": 4.0, "live_per_s": 3.0, "items_failed": 2}
    full = row | {"size": 1000, "state": "refused before any work: 409", "items_failed": 0}
    found = summary(10, [row, other, full])
    assert (found["jobs"], found["live"], found["rejected"]) == (2, 1, 1)
    assert (found["items_failed"], found["live_items_per_s"]) == (12, 1.5)
    assert found["judged_items_per_s"] == 3.0
    assert summary(1000, [row, full])["refused"] == ["refused before any work: 409"]


def test_made_up_texts_are_new(tiny_catalog: ItemCatalog) -> None:
    texts = made_up(tiny_catalog, seed=0)
    items = [next(texts) for _ in range(20)]
    titles = {item["title"] for item in items}
    assert len(titles) == len({item["item_id"] for item in items}) == 20
    assert not titles & {item.title for item in tiny_catalog}


@pytest.mark.demo
def test_films_are_new_and_their_histories_are_not() -> None:
    catalog = load_bundle(DEMO_BUNDLE).catalog
    titles = {item.title for item in catalog}
    genres = {genre for item in catalog for genre in item.attributes["genres"]}
    assert len(FILMS) >= 20
    for film in (*FILMS, FIRST):
        assert film.title not in titles
        assert set(film.genres) <= genres
        assert all(item_id in catalog for item_id in film.history)
        assert film.item("x")["attributes"]["year"] >= 1998


@pytest.fixture
def server(tmp_path: Path, tiny_bundle: Path) -> Iterator[Server]:
    """A service over the fake engine, with a fake worker beside it."""
    server = Server(tiny_bundle, tmp_path, engine="fake")
    server.begin()
    worker = None
    try:
        asyncio.run(server.ready())
        worker = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "tests" / "fake_worker.py"),
                str(tiny_bundle),
                str(tmp_path / "store-1.db"),
            ],
            env=environment(),
            stderr=subprocess.DEVNULL,
        )
        yield server
    finally:
        if worker is not None:
            worker.send_signal(signal.SIGTERM)
            worker.wait(30)
        server.end()


def test_publishing_and_replay_over_the_fake_engine(
    server: Server, tiny_catalog: ItemCatalog
) -> None:
    options = argparse.Namespace(
        clients=2, publishes=24, pairs=2, interval=0.05, replays=3, tolerance=0.0
    )
    run = Run(server, tiny_catalog, options)
    found, groups = asyncio.run(run.publishing())
    assert found["published"] == 24
    assert {"retire", "restore", "back", "forward", "onboard"} <= found["kinds"].keys()
    assert (found["failed_calls"], found["admin_fault_count"]) == (0, 0)
    assert (found["wrong"], found["of_another_version"]) == ([], 0)
    assert found["versions_that_answered"] > 5
    assert all(groups.values())
    again = asyncio.run(run.replay(groups))
    assert again["violated"] == []
    assert again["publish"]["equal_share"] == again["between"]["equal_share"] == 1.0
    films = {"quiet_summary": {"films": 1}, "under_load_summary": {"films": 2}}
    parts = {"starts": [{"ready_s": 1.0}], "films": films, "batches": {"summary": []}}
    lines = table({**parts, "publishing": found, "replay": again}).splitlines()
    assert "films, under load: films 2" in lines
    assert any(line.startswith("overlapping a publish") for line in lines)

    # The check can fail: an answer that says another version's name is found out.
    liar = replace(groups["publish"][0], items=(("a1", -0.5),))
    assert asyncio.run(run.replay({"lies": [liar]}))["violations"] == 1


def test_jobs_that_do_not_get_live_change_nothing(server: Server) -> None:
    async def work() -> None:
        async with caller(server.url) as client, load(client, lambda: ["a1"], 1) as answers:
            changes = Changes(client, server.book)
            job = await changes.onboard([{"item_id": "n1", "title": "reject"}])
            assert (job["state"], job["why"]) == (
                "rejected",
                ["unlike its text", "no item passed"],
            )
            many = [{"item_id": f"n{n}", "title": f"T{n}"} for n in range(3)]
            job = await changes.onboard(many)
            assert job["state"] == "refused before any work: 409 reserve_exhausted"
            assert server.book == Book()
            assert await changes.activate(5) is None
            assert "404" in changes.faults[0]
            bad = await ask(client, [])
            assert (bad.status, bad.version) == (200, 1)
        assert answers
        assert not any(answer.failed for answer in answers)

    asyncio.run(work())


def test_a_service_that_does_not_start_is_told(tmp_path: Path) -> None:
    server = Server(tmp_path / "nowhere", tmp_path, engine="fake")
    server.begin()
    with pytest.raises(SystemExit, match="nowhere"):
        asyncio.run(server.ready())
    server.end()


def test_both_runs_in_one_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def measure(options: argparse.Namespace) -> dict[str, Any]:
        seen.append(options)
        return {"rows": []}

    monkeypatch.setattr(onboarding_quality, "measure", measure)
    file = tmp_path / "out.json"
    onboarding.main(
        ["--only", "quality", "--data", "d", "--work", "w", "--json", str(file), "--share", "0.1"]
    )
    assert seen[0].share == 0.1
    assert '"quality": {\n    "rows": []\n  }' in file.read_text()
    with pytest.raises(SystemExit):
        onboarding.main(["--only", "quality"])
    assert "--data and --work" in capsys.readouterr().err
