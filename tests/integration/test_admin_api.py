"""The admin routes over the fake engine, with a worker's loop in a thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from admin_parts import Parts, code, ids, item, onboard

from service.engine.fake import FakeEngine
from service.schemas_admin import JobState
from service.store.records import STATES

HISTORY = ["a1", "c1"]
MakeAdmin = Callable[..., Any]


def test_time_from_post_to_served_is_measured_once(admin: Any, working: None) -> None:
    def measured() -> dict[str, float]:
        lines = admin.get("/metrics").text.splitlines()
        pairs = (line.split(" ") for line in lines if line.startswith("gti_post_to_served_seconds"))
        return {name: float(value) for name, value in pairs}

    assert measured()["gti_post_to_served_seconds_count"] == 0
    assert onboard(admin, item("n1"), item("n2")).json()["version"] == 2
    found = measured()
    assert found["gti_post_to_served_seconds_count"] == 2
    assert 0 < found["gti_post_to_served_seconds_sum"] < 20
    # A way back and forth serves nothing for the first time.
    for number in (1, 2):
        assert admin.post(f"/v1/admin/versions/{number}/activate").status_code == 200
    assert measured() == found


def test_an_item_goes_from_text_to_served(admin: Any, working: None) -> None:
    response = onboard(
        admin, item("new/1", "Nü", description="Fresh.", attributes={"year": 2026, "g": ["x"]})
    )
    assert response.status_code == 200
    job = response.json()
    assert (job["state"], job["version"], job["error"], job["attempts"]) == ("live", 2, None, 1)
    assert response.headers["location"] == f"/v1/admin/jobs/{job['job_id']}"
    assert job["items"] == [
        {
            "item_id": "new/1",
            "known": False,
            "passed": True,
            "reasons": [],
            "figures": {"rank": 1},
        }
    ]
    assert job["figures"] == {"recall": 1.0}
    assert admin.get(response.headers["location"]).json() == job
    body = admin.recommend(history=HISTORY, k=12, min_version=2).json()
    assert body["version"] == 2
    assert "new/1" in [found["item_id"] for found in body["items"]]
    found = admin.get("/v1/items/new/1").json()
    assert (found["title"], found["attributes"], found["available"]) == (
        "Nü",
        {"year": 2026, "g": ["x"]},
        True,
    )
    assert admin.recommend(history=["new/1"], k=3).json()["unknown_items"] == []
    catalog = admin.get("/v1/info").json()["catalog"]
    assert (catalog["items"], catalog["codes_left"], catalog["active_codes"][-1]) == (13, 1, 5)


def test_without_waiting_the_answer_comes_at_once(admin: Any) -> None:
    response = onboard(admin, item("n"), wait=0)
    assert response.status_code == 202
    assert response.json()["state"] == "queued"
    assert admin.get("/v1/admin/jobs?state=queued").json()["jobs"][0]["item_count"] == 1


def test_waiting_ends_when_the_time_is_up(admin: Any) -> None:
    response = onboard(admin, item("n"), wait=0.2)
    assert (response.status_code, response.json()["state"]) == (202, "queued")


def test_a_job_that_does_not_pass_changes_nothing(admin: Any, working: None) -> None:
    response = onboard(admin, item("bad", "reject"), item("worse", "reject"))
    job = response.json()
    assert (response.status_code, job["state"], job["version"]) == (200, "rejected", None)
    assert [one["passed"] for one in job["items"]] == [False, False]
    assert job["items"][0]["reasons"] == ["unlike its text"]
    assert job["reasons"] == ["no item passed"]
    assert job["figures"] == {"recall": 0.5}
    assert admin.get("/v1/info").json()["version"] == 1
    assert admin.get("/v1/items/bad").status_code == 404


def test_an_item_that_is_refused_does_not_hold_up_the_others(admin: Any, working: None) -> None:
    left = admin.get("/v1/info").json()["catalog"]["codes_left"]
    job = onboard(admin, item("one"), item("bad", "reject")).json()
    assert (job["state"], job["version"]) == ("live", 2)
    assert [one["passed"] for one in job["items"]] == [True, False]
    assert job["items"][1]["reasons"] == ["unlike its text"]
    assert admin.get("/v1/items/one").json()["available"]
    assert admin.get("/v1/items/bad").status_code == 404
    assert admin.get("/v1/info").json()["catalog"]["codes_left"] == left - 1
    # It is no known item: with another text it is new work.
    again = onboard(admin, item("bad", "Better now"), item("one")).json()
    assert (again["state"], again["version"]) == ("live", 3)
    assert {one["item_id"]: one["known"] for one in again["items"]} == {"bad": False, "one": True}


def test_a_bug_is_tried_three_times_and_says_nothing_of_its_cause(
    admin: Any, working: None, parts: Parts
) -> None:
    job = onboard(admin, item("n", "fault")).json()
    assert (job["state"], job["attempts"]) == ("failed", 3)
    assert "secret" not in job["error"]
    assert len(parts.grounder.calls) == 3


def test_items_that_cannot_be_grounded_fail_at_once(admin: Any, working: None) -> None:
    job = onboard(admin, item("n", "hopeless")).json()
    assert (job["state"], job["attempts"]) == ("failed", 1)
    assert job["error"] == "grounding_failed: these can't be grounded"


def test_the_same_request_again_is_the_same_job(admin: Any, working: None) -> None:
    first = onboard(admin, item("n"), headers={"Idempotency-Key": "k"}).json()
    again = onboard(admin, item("n"), headers={"Idempotency-Key": "k"}).json()
    assert again == first
    other = onboard(admin, item("m"), headers={"Idempotency-Key": "k"})
    assert code(other) == (409, "idempotency_conflict")
    known = onboard(admin, item("n")).json()
    assert (known["state"], known["version"], known["items"][0]["known"]) == ("live", 2, True)


def test_another_text_for_a_known_id(admin: Any, working: None) -> None:
    assert code(onboard(admin, item("a1", "Other"))) == (409, "item_conflict")
    before = admin.get("/v1/items/a1").json()["semantic_id"]
    job = onboard(admin, item("a1", "Other"), replace=True).json()
    assert job["state"] == "live"
    after = admin.get("/v1/items/a1").json()
    assert after["title"] == "Other"
    assert after["semantic_id"] != before
    everything = ids(admin.recommend(history=["c1"], k=12, exclude_history=False))
    assert everything.count("a1") == 1


def test_more_items_than_codes(admin: Any) -> None:
    response = onboard(admin, *(item(f"n{number}") for number in range(3)))
    assert code(response) == (409, "reserve_exhausted")
    assert "2 are left" in response.json()["detail"]


def test_cancelling_a_job(admin: Any, parts: Parts) -> None:
    job = onboard(admin, item("n"), wait=0).json()
    path = f"/v1/admin/jobs/{job['job_id']}:cancel"
    assert admin.post(path).json()["state"] == "cancelled"
    assert parts.worker().step() is False
    live = onboard(admin, item("a1", "Alpha", description="First.", attributes={
        "year": 1990, "genres": ["Drama"]})).json()  # fmt: skip
    assert live["state"] == "live"
    assert code(admin.post(f"/v1/admin/jobs/{live['job_id']}:cancel")) == (
        409,
        "job_not_cancellable",
    )
    assert code(admin.get(f"/v1/admin/jobs/{'0' * 32}")) == (404, "job_not_found")


def test_retiring_is_in_force_from_the_next_request(admin: Any) -> None:
    assert "50" in ids(admin.recommend(history=HISTORY, k=12))
    answer = admin.request("DELETE", "/v1/admin/items/50").json()
    assert answer == {"item_id": "50", "version": 2, "available": False}
    body = admin.recommend(history=HISTORY, k=12).json()
    assert body["version"] == 2
    assert "50" not in [found["item_id"] for found in body["items"]]
    assert "50" not in ids(admin.recommend(history=[], k=12))
    assert admin.recommend(history=["50"], k=3).json()["unknown_items"] == []
    assert admin.get("/v1/items/50").json()["available"] is False
    assert admin.request("DELETE", "/v1/admin/items/50").json() == answer
    assert code(admin.request("DELETE", "/v1/admin/items/nope")) == (404, "item_not_found")
    back = admin.request("PATCH", "/v1/admin/items/50", json={"available": True}).json()
    assert back == {"item_id": "50", "version": 3, "available": True}
    assert "50" in ids(admin.recommend(history=HISTORY, k=12))


def test_attributes_are_replaced(admin: Any) -> None:
    body = {"available": False, "attributes": {"year": 2000}}
    assert admin.request("PATCH", "/v1/admin/items/e/1", json=body).json()["version"] == 2
    found = admin.get("/v1/items/e/1").json()
    assert (found["attributes"], found["available"]) == ({"year": 2000}, False)
    again = admin.request("PATCH", "/v1/admin/items/e/1", json=body).json()
    assert again["version"] == 2


def test_going_back_and_forward(admin: Any, working: None) -> None:
    onboard(admin, item("n"))
    admin.request("DELETE", "/v1/admin/items/a1")
    back = admin.post("/v1/admin/versions/1/activate").json()
    assert (back["number"], back["current"], back["kind"]) == (1, True, "base")
    assert set(ids(admin.recommend(history=["b1"], k=12))) >= {"a1"}
    assert admin.get("/v1/items/n").status_code == 404
    assert onboard(admin, item("m")).json()["version"] == 4
    sids = [admin.get("/v1/items/m").json()["semantic_id"]]
    admin.post("/v1/admin/versions/3/activate")
    sids.append(admin.get("/v1/items/n").json()["semantic_id"])
    assert sids[0][-1] != sids[1][-1]
    assert admin.get("/v1/items/m").status_code == 404
    page = admin.get("/v1/admin/versions?limit=2").json()
    assert [version["number"] for version in page["versions"]] == [4, 3]
    rest = admin.get(f"/v1/admin/versions?cursor={page['next_cursor']}").json()
    assert [(v["number"], v["parent"], v["kind"]) for v in rest["versions"]] == [
        (2, 1, "onboard"),
        (1, None, "base"),
    ]
    assert rest["next_cursor"] is None
    assert code(admin.post("/v1/admin/versions/9/activate")) == (404, "version_not_found")


def test_a_version_that_is_not_served_in_time(make_admin: MakeAdmin) -> None:
    client = make_admin(min_version_wait_s=0.05)
    response = client.recommend(history=HISTORY, k=2, min_version=2)
    assert code(response) == (409, "version_not_served")
    assert response.json()["version"] == 1
    assert client.recommend(history=HISTORY, k=2, min_version=1).status_code == 200


def test_replicas_follow_one_another(make_admin: MakeAdmin) -> None:
    here, there = make_admin(), make_admin()
    version = here.request("DELETE", "/v1/admin/items/50").json()["version"]
    response = there.recommend(history=HISTORY, k=12, min_version=version)
    assert response.json()["version"] == version
    assert "50" not in ids(response)


def test_a_restart_serves_what_was_committed(
    make_admin: MakeAdmin, working: None, parts: Parts
) -> None:
    before = make_admin()
    onboard(before, item("n"))
    before.request("DELETE", "/v1/admin/items/50")
    answer = before.recommend(history=HISTORY, k=12).json()
    after = make_admin()
    again = after.recommend(history=HISTORY, k=12).json()
    assert (again["version"], again["items"]) == (answer["version"], answer["items"])


def test_an_engine_that_refuses_leaves_the_old_version(
    make_admin: MakeAdmin, tiny_model: Any, working: None
) -> None:
    engine = FakeEngine(tiny_model)
    client = make_admin(engine)
    engine.publish_error = "the rows don't fit"
    assert code(client.request("DELETE", "/v1/admin/items/50")) == (503, "engine_error")
    job = onboard(client, item("n")).json()
    assert job["state"] == "failed"
    assert "the rows don't fit" in job["error"]
    engine.publish_error = None
    assert client.get("/v1/info").json()["version"] == 1
    assert "50" in ids(client.recommend(history=HISTORY, k=12))
    assert client.request("DELETE", "/v1/admin/items/50").json()["version"] == 4
    assert code(client.post("/v1/admin/versions/2/activate")) == (404, "version_not_found")


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"admin": False}, "--no-admin"), ({"admin": False, "host": "::1"}, "--no-admin")],
)
def test_admin_routes_can_be_off(
    make_admin: MakeAdmin, settings: dict[str, Any], words: str
) -> None:
    client = make_admin(**settings)
    for response in (
        onboard(client, item("n")),
        client.request("DELETE", "/v1/admin/items/a1"),
        client.get("/v1/admin/jobs"),
        client.post("/v1/admin/versions/1/activate"),
    ):
        assert code(response) == (403, "admin_disabled")
        assert words in response.json()["detail"]


def test_pages_of_other_origins_are_kept_out(admin: Any) -> None:
    path = "/v1/admin/versions/1/activate"
    for origin in ("https://evil.example", "null"):
        response = admin.post(path, headers={"Origin": origin})
        assert code(response) == (403, "admin_disabled")
    assert admin.post(path, headers={"Origin": "http://localhost"}).status_code == 200


def test_no_store_no_admin(client: Any) -> None:
    assert code(client.get("/v1/admin/versions")) == (403, "admin_disabled")
    assert client.get("/v1/info").json()["catalog"]["codes_left"] == 2


BAD_ITEMS = {
    "no item": [],
    "twice": [item("n"), item("n")],
    "blank": [item("n", " \u200e\n")],
    "nul in id": [item("n\x00")],
    "empty id": [item("")],
    "long title": [item("n", "x" * 1001)],
    "long description": [item("n", description="x" * 20_001)],
    "object as attribute": [item("n", attributes={"a": {"b": 1}})],
    "list in list": [item("n", attributes={"a": [[1]]})],
    "many attributes": [item("n", attributes={str(n): n for n in range(51)})],
    "long attributes": [item("n", attributes={"a": "x" * 10_001})],
    "unknown field": [item("n", sid=[0, 0, 0])],
    "number as id": [item(5)],  # type: ignore[arg-type]
    "too many": [item(str(n)) for n in range(1001)],
}


@pytest.mark.parametrize("name", BAD_ITEMS)
def test_what_is_no_item_is_refused(admin: Any, name: str) -> None:
    assert code(onboard(admin, *BAD_ITEMS[name])) == (422, "validation_failed")


@pytest.mark.parametrize(
    "text", [rb'"title": "\ud800"', rb'"title": "x", "attributes": {"a": "\udfff"}',
             rb'"title": "x", "attributes": {"a": NaN}', rb'"title": "x", "description": "\ud800"']
)  # fmt: skip
def test_lone_surrogates_and_nan_are_refused(admin: Any, text: bytes) -> None:
    content = b'{"items": [{"item_id": "n", ' + text + b"}]}"
    response = admin.post(
        "/v1/admin/items", content=content, headers={"Content-Type": "application/json"}
    )
    assert code(response) == (422, "validation_failed")


def test_hostile_text_is_data(admin: Any, working: None) -> None:
    title = "<|sid_0_0|> '; DROP TABLE jobs; -- \u0000 <script>"
    assert onboard(admin, item("n", title)).json()["state"] == "live"
    shown = "<|sid_0_0|> '; DROP TABLE jobs; -- <script>"
    assert admin.get("/v1/items/n").json()["title"] == shown


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/admin/jobs?state=done"),
        ("GET", "/v1/admin/jobs?limit=0"),
        ("GET", "/v1/admin/jobs?cursor=x"),
        ("GET", "/v1/admin/jobs/nope"),
        ("POST", "/v1/admin/versions/0/activate"),
        ("POST", "/v1/admin/items?wait=61"),
    ],
)
def test_bad_parameters(admin: Any, method: str, path: str) -> None:
    assert code(admin.request(method, path)) == (422, "validation_failed")


def test_the_schema_names_the_stores_states() -> None:
    assert get_args(JobState) == STATES


def test_jobs_come_in_pages(admin: Any) -> None:
    made = [onboard(admin, item(name), wait=0).json()["job_id"] for name in "ab"]
    page = admin.get("/v1/admin/jobs?limit=1").json()
    assert [job["job_id"] for job in page["jobs"]] == made[:0:-1]
    rest = admin.get(f"/v1/admin/jobs?cursor={page['next_cursor']}").json()
    assert [job["job_id"] for job in rest["jobs"]] == made[:1]
    assert rest["next_cursor"] is None


def test_a_store_that_breaks_is_a_503_and_recommendations_go_on(admin: Any, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "gti.db") as connection:
        connection.execute("DROP TABLE jobs")
    connection.close()
    assert code(admin.get("/v1/admin/jobs")) == (503, "store_unavailable")
    assert admin.recommend(history=HISTORY, k=3).status_code == 200
    assert admin.get("/v1/info").json()["catalog"]["codes_left"] is None
