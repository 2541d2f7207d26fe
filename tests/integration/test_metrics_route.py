"""Metrics and timings, through the public door."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from gti_core.bundle.delta import CatalogState
from gti_core.decoding import ScoredRow
from service.engine.base import DecodeRequest, EngineError, ServingModel
from service.engine.fake import FakeEngine
from service.onboarding.running import Onboarding
from service.store import Store

STAGES = ("queue_ms", "prefill_ms", "beams_ms", "render_ms")


def scrape(client: Any, **options: Any) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names) -> value."""
    response = client.get("/metrics", **options)
    assert response.status_code == 200
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_answers_say_where_their_time_went(client: Any) -> None:
    body = client.recommend(history=["a1", "c1"], k=4).json()
    times = body["timings"]
    assert set(times) == {*STAGES, "total_ms"}
    assert all(times[stage] >= 0 for stage in STAGES)
    assert sum(times[stage] for stage in STAGES) <= times["total_ms"] + 0.01
    assert times["total_ms"] >= body["took_ms"]


def test_time_of_the_engine_lands_in_its_stage(make_client: Any, tiny_model: ServingModel) -> None:
    client = make_client(FakeEngine(tiny_model, delay_s=0.02)).wait_ready()
    times = client.recommend(history=["a1"]).json()["timings"]
    assert times["prefill_ms"] >= 20
    assert times["beams_ms"] >= 40
    found = scrape(client)
    assert found["gti_stage_seconds_sum", "model", "beams"] >= 0.04
    assert found["gti_stage_seconds_count", "model", "total"] == 1
    for level in "012":
        assert found["gti_constraint_seconds_count", level] == 1


def test_a_fallback_has_no_time_of_the_engine(client: Any) -> None:
    for history in ([], ["nobody"]):
        times = client.recommend(history=history).json()["timings"]
        assert [times[stage] for stage in STAGES[:3]] == [None] * 3
        assert 0 <= times["render_ms"] <= times["total_ms"]
    found = scrape(client)
    assert found["gti_fallbacks_total", "empty_history"] == 1
    assert found["gti_fallbacks_total", "no_known_item"] == 1
    assert found["gti_recommendations_total", "fallback"] == 2
    assert found["gti_stage_seconds_count", "fallback", "total"] == 2
    assert found["gti_stage_seconds_count", "model", "total"] == 0


def test_each_of_a_batch_is_counted(client: Any) -> None:
    bodies = [{"history": ["a1"]}, {"history": []}, {"history": ["a1"], "k": 9999}]
    results = client.post("/v1/recommendations:batch", json={"requests": bodies}).json()["results"]
    assert results[0]["answer"]["timings"]["beams_ms"] is not None
    assert results[1]["answer"]["timings"]["beams_ms"] is None
    found = scrape(client)
    assert found["gti_recommendations_total", "model"] == 1
    assert found["gti_recommendations_total", "fallback"] == 1
    assert found["gti_problems_total", "validation_failed"] == 1
    route = "/v1/recommendations:batch"
    assert found["gti_http_requests_total", "POST", route, "200"] == 1


def test_requests_are_counted_by_route_and_status(client: Any) -> None:
    for item in ("a1", "e%2F1", "nobody", "x" * 300):
        client.get(f"/v1/items/{item}")
    for number in range(5):
        client.get(f"/nothing/{number}")
    client.request("BREW", "/v1/items/a1")
    client.post("/v1/info")
    found = scrape(client)
    counted = {
        key[1:]: value for key, value in found.items() if key[0] == "gti_http_requests_total"
    }
    counted = {key: value for key, value in counted.items() if key[1] != "/readyz"}
    item = "/v1/items/{item_id}"
    assert counted == {
        ("GET", item, "200"): 2,
        ("GET", item, "404"): 1,
        ("GET", item, "422"): 1,
        ("GET", "unknown", "404"): 5,
        ("other", item, "405"): 1,
        ("POST", "/v1/info", "405"): 1,
    }
    assert found["gti_http_request_seconds_count", "GET", item] == 4
    assert found["gti_problems_total", "not_found"] == 5
    assert found["gti_problems_total", "method_not_allowed"] == 2


def test_refusals_of_every_layer_are_counted(make_client: Any, tiny_model: ServingModel) -> None:
    engine = FakeEngine(tiny_model, delay_s=0.05)
    client = make_client(engine, max_body_bytes=1024).wait_ready()
    assert client.recommend(history=["a1"], timeout_ms=1).status_code == 504
    assert client.post("/v1/recommendations", content=b" " * 2000).status_code == 413
    client.get("/v1/info", headers={"Host": "elsewhere.example"})

    async def fail(_: Any) -> Any:
        raise RuntimeError("inside")

    client.app.state.runtime._engine.decode = fail
    assert client.recommend(history=["a1"]).status_code == 500
    found = scrape(client)
    for code, status in {
        "deadline_exceeded": "504",
        "body_too_large": "413",
        "internal_error": "500",
    }.items():
        assert found["gti_problems_total", code] == 1
        assert found["gti_http_requests_total", "POST", "/v1/recommendations", status] == 1
    assert found["gti_problems_total", "foreign_host"] == 1
    assert found["gti_http_requests_total", "GET", "/v1/info", "421"] == 1


def test_what_the_rate_limit_sheds_is_counted(make_client: Any, fake_engine: FakeEngine) -> None:
    client = make_client(fake_engine, rate_limit=0.01).wait_ready()
    statuses = [client.get("/v1/info").status_code for _ in range(3)]
    shed = statuses.count(429)
    assert shed >= 1
    # Read where it stands: a scrape would be shed too.
    counted = client.app.state.runtime.telemetry.meters.registry.get_sample_value
    assert counted("gti_problems_total", {"code": "rate_limited"}) == shed
    labels = {"method": "GET", "route": "/v1/info", "status": "429"}
    assert counted("gti_http_requests_total", labels) == shed


class Lawless(FakeEngine):
    """Returns what nobody may see."""

    rows: tuple[int, ...] = ()

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        found = await super().decode(request)
        items = self.model.catalog.items
        more = [ScoredRow(row, items[row % len(items)].sid, -0.1) for row in self.rows]
        return more + found


def test_illegal_items_are_dropped_counted_and_logged(
    make_client: Any, tiny_model: ServingModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Lawless(tiny_model)
    client = make_client(engine).wait_ready()
    lawful = client.recommend(history=["a1"], k=3).json()["items"]
    assert scrape(client)["gti_illegal_items_total",] == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    # The history's own item, a row below the catalogue and one above it.
    engine.rows = (0, -1, 12)
    assert client.recommend(history=["a1"], k=3).json()["items"] == lawful
    assert scrape(client)["gti_illegal_items_total",] == 3
    [line] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "3 items" in line.getMessage()
    # What a filter or a list leaves out is as illegal.
    engine.rows = (1, 2)
    body = {"history": ["a1"], "k": 3, "include_items": ["b1", "b2", "c1"]}
    assert {one["item_id"] for one in client.recommend(**body).json()["items"]} == {
        "b1",
        "b2",
        "c1",
    }
    assert scrape(client)["gti_illegal_items_total",] == 5


def test_an_item_out_of_service_is_illegal(make_client: Any, tiny_model: ServingModel) -> None:
    from dataclasses import replace

    index = tiny_model.index.with_availability([2], False)
    engine = Lawless(replace(tiny_model, index=index))
    engine.rows = (2,)
    client = make_client(engine).wait_ready()
    answer = client.recommend(history=["a1"], k=11).json()
    assert "a3" not in [one["item_id"] for one in answer["items"]]
    found = scrape(client)
    assert found["gti_illegal_items_total",] == 1
    assert (found["gti_items",], found["gti_items_in_service",]) == (12, 11)


def test_gauges_before_and_after_the_engine(make_client: Any, tiny_model: ServingModel) -> None:
    engine = FakeEngine(tiny_model, start_delay_s=0.05)
    client = make_client(engine, engine="fake")
    before = scrape(client)
    assert before["gti_engine_up",] == 0
    assert ("gti_version",) not in before
    client.wait_ready()
    ready = scrape(client)
    assert (ready["gti_engine_up",], ready["gti_version",]) == (1, 1)
    assert ready["gti_build_info", "tiny", "fake", "0.1.0", ""] == 1
    assert ready["gti_reserve_left",] == 2
    assert ready["process_resident_memory_bytes",] > 1e6
    engine.kill()
    client.sleep(0.1)
    assert scrape(client)["gti_engine_up",] == 0


def test_openmetrics(client: Any) -> None:
    client.recommend(history=["a1"])
    response = client.get(
        "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics_families(response.text)}
    assert {"gti_stage_seconds", "gti_illegal_items", "gti_engine_up"} <= names


def test_two_applications_have_metrics_of_their_own(
    make_client: Any, tiny_model: ServingModel
) -> None:
    first, second = (make_client(FakeEngine(tiny_model)).wait_ready() for _ in range(2))
    first.recommend(history=["a1"])
    assert scrape(first)["gti_recommendations_total", "model"] == 1
    assert scrape(second)["gti_recommendations_total", "model"] == 0


@pytest.fixture
def onboarded(make_client: Any, tiny_model: ServingModel, tiny_context: Any, tmp_path: Path) -> Any:
    """An application over a store, and the store's file."""
    file = tmp_path / "gti.db"
    context = tiny_context
    store = Store(str(file), context.name, context.digest, context.vocabulary)
    base = CatalogState(context.catalog, context.vocabulary, context.index)
    options = {"onboarding": Onboarding(store, base, poll_s=0.02)}
    return make_client(FakeEngine(tiny_model), app_options=options).wait_ready(), file


def test_jobs_and_reserve_are_the_store_s(onboarded: Any) -> None:
    client, _ = onboarded
    posted = client.post("/v1/admin/items", json={"items": [{"item_id": "n1", "title": "New"}]})
    assert posted.status_code == 202
    found = scrape(client)
    assert found["gti_store_up",] == 1
    assert found["gti_jobs", "queued"] == 1
    assert found["gti_jobs", "failed"] == 0
    assert found["gti_reserve_left",] == 1
    assert found["gti_grounding_workers", "ready"] == 0


def test_a_store_that_fails_fails_no_scrape(onboarded: Any) -> None:
    client, file = onboarded
    with sqlite3.connect(file) as database:
        database.execute("DROP TABLE workers")
    found = scrape(client)
    assert found["gti_store_up",] == 0
    assert ("gti_jobs", "queued") not in found
    assert found["gti_engine_up",] == 1


def test_a_failing_engine_is_counted(make_client: Any, tiny_model: ServingModel) -> None:
    class Failing(FakeEngine):
        async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
            raise EngineError("no")

    client = make_client(Failing(tiny_model)).wait_ready()
    client.recommend(history=["a1"])
    found = scrape(client)
    assert found["gti_problems_total", "engine_error"] == 1
    assert found["gti_recommendations_total", "model"] == 0
