"""What is counted, as a scrape shows it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from service.engine.timings import LevelTimer, Load, Timings
from service.store.errors import StoreError
from service.store.store import StoreSummary
from service.store.workers import WorkerCounts
from service.telemetry.facts import Facts
from service.telemetry.meters import Meters
from service.telemetry.store_watch import StoreWatch
from service.telemetry.telemetry import Telemetry

SUMMARY = StoreSummary({"queued": 2, "failed": 1}, 7, WorkerCounts(1, 3))
FACTS = Facts(True, 5, 12, 11, Load(3, 4), 60, SUMMARY, {"version": "1", "bundle": 'a "b"\n'})


def value(meters: Meters, name: str, **labels: str) -> float | None:
    return meters.registry.get_sample_value(name, labels)


def test_requests_with_odd_methods_and_paths_share_a_series() -> None:
    meters = Meters()
    for method in ("BREW", "x" * 1000, "get"):
        meters.request(method, None, 404, 0.01, "not_found")
    meters.request("GET", "/v1/items/{item_id}", 200, 0.01, None)
    found = {
        tuple(sample.labels.values())
        for metric in meters.registry.collect()
        for sample in metric.samples
        if sample.name == "gti_http_requests_total"
    }
    assert found == {("other", "unknown", "404"), ("GET", "/v1/items/{item_id}", "200")}
    assert value(meters, "gti_problems_total", code="not_found") == 3
    assert value(meters, "gti_problems_total", code="rate_limited") == 0


def test_a_recommendation_is_split_into_stages() -> None:
    meters = Meters()
    timings = Timings(0.5, 0.25, 2.0, [0.001, 0.002], 100, 60)
    meters.answered(timings, 0.125, 3.0, None)
    for stage, seconds in {
        "queue": 0.5, "prefill": 0.25, "beams": 2.0, "render": 0.125, "total": 3.0,
    }.items():  # fmt: skip
        assert value(meters, "gti_stage_seconds_sum", stage=stage, source="model") == seconds
        assert value(meters, "gti_stage_seconds_count", stage=stage, source="model") == 1
    assert value(meters, "gti_constraint_seconds_sum", level="1") == 0.002
    assert value(meters, "gti_prompt_tokens_total") == 100
    assert value(meters, "gti_cached_prompt_tokens_total") == 60
    assert value(meters, "gti_recommendations_total", source="model") == 1
    assert value(meters, "gti_recommendations_total", source="fallback") == 0


def test_a_fallback_is_counted_apart_and_has_no_engine_stages() -> None:
    meters = Meters()
    meters.answered(None, 0.25, 0.5, "empty_history")
    assert value(meters, "gti_fallbacks_total", reason="empty_history") == 1
    assert value(meters, "gti_fallbacks_total", reason="no_known_item") == 0
    assert value(meters, "gti_recommendations_total", source="fallback") == 1
    assert value(meters, "gti_stage_seconds_sum", stage="total", source="fallback") == 0.5
    assert value(meters, "gti_stage_seconds_count", stage="total", source="model") == 0
    assert value(meters, "gti_stage_seconds_count", stage="queue", source="fallback") is None


def test_two_applications_count_apart() -> None:
    first, second = Meters(), Meters()
    first.illegal(2)
    first.served(3, 4.0)
    assert value(first, "gti_illegal_items_total") == 2
    assert value(first, "gti_post_to_served_seconds_sum") == 12
    assert value(second, "gti_illegal_items_total") == 0
    assert value(second, "gti_post_to_served_seconds_count") == 0


def test_gauges_say_how_things_stand() -> None:
    telemetry = Telemetry()
    body, content_type = asyncio.run(telemetry.scrape(FACTS, ""))
    assert content_type.startswith("text/plain; version=0.0.4")
    lines = body.decode().splitlines()
    for line in (
        "gti_engine_up 1.0",
        "gti_version 5.0",
        "gti_items 12.0",
        "gti_items_in_service 11.0",
        "gti_engine_running_requests 3.0",
        "gti_engine_waiting_requests 4.0",
        "gti_beams_under_way 60.0",
        "gti_store_up 1.0",
        "gti_reserve_left 7.0",
        'gti_jobs{state="queued"} 2.0',
        'gti_jobs{state="live"} 0.0',
        'gti_grounding_workers{state="starting"} 3.0',
        'gti_build_info{bundle="a \\"b\\"\\n",version="1"} 1.0',
    ):
        assert line in lines
    assert not any("_created" in line for line in lines)


def test_what_is_not_known_is_left_out() -> None:
    facts = Facts(False, None, 12, 12, Load(0, 0), 0, None, {"version": "1"})
    text = asyncio.run(Telemetry().scrape(facts, ""))[0].decode()
    assert "gti_engine_up 0.0" in text
    assert "gti_store_up 0.0" in text
    for name in ("gti_version ", "gti_jobs", "gti_reserve_left", "gti_grounding_workers"):
        assert name not in text


def test_openmetrics_where_it_is_asked_for() -> None:
    accept = "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"
    body, content_type = asyncio.run(Telemetry().scrape(FACTS, accept))
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")


def test_the_store_is_read_seldom_and_never_waited_for() -> None:
    readings: list[float] = []
    hold = threading.Event()

    def read() -> StoreSummary:
        readings.append(time.monotonic())
        if len(readings) == 2:
            raise StoreError("locked")
        if len(readings) == 3:
            hold.wait(10)
        return SUMMARY

    async def work() -> None:
        watch = StoreWatch(read, fresh_s=0.05, wait_s=0.2)
        found = await asyncio.gather(*(watch.latest() for _ in range(10)))
        assert found == [SUMMARY] * 10
        assert len(readings) == 1
        await asyncio.sleep(0.06)
        assert await watch.latest() is None
        await asyncio.sleep(0.06)
        assert await asyncio.wait_for(watch.latest(), 5) is None
        assert await watch.latest() is None
        assert len(readings) == 3
        hold.set()
        await asyncio.sleep(0.1)
        assert await watch.latest() == SUMMARY

    try:
        asyncio.run(work())
    finally:
        hold.set()


@pytest.mark.parametrize("queued", [True, False])
def test_a_level_timer_adds_up(queued: bool) -> None:
    timings = Timings()
    timer = LevelTimer(timings, queued=queued)
    for _ in range(3):
        time.sleep(0.002)
        timer.scored()
        time.sleep(0.001)
        timer.chosen()
    assert (timings.queue_s is not None) is queued
    assert timings.prefill_s is not None
    assert timings.beams_s is not None
    assert timings.prefill_s >= 0.002
    assert len(timings.constraint_s) == 3
    assert min(timings.constraint_s) >= 0.001
    assert timings.beams_s >= sum(timings.constraint_s) + 0.004
    assert timings.prefill_s + timings.beams_s <= time.monotonic() - timings.asked
    timings.restart()
    assert (timings.queue_s, timings.prefill_s, timings.constraint_s) == (None, None, [])
