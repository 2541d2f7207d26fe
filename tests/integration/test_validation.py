"""What the service refuses, what it accepts, and how it says so."""

from __future__ import annotations

import json
import re
import time
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from admin_parts import code, item, onboard

JSON = {"Content-Type": "application/json"}
FILTER = '{"history": ["a1"], "filters": [{"attribute": "year", "%s": %s}]}'


def post(client: Any, content: str, path: str = "/v1/recommendations") -> httpx.Response:
    response: httpx.Response = client.post(path, content=content.encode(), headers=JSON)
    return response


@pytest.mark.parametrize("part", ["any_of", "none_of"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_filters_take_finite_numbers_only(client: Any, part: str, value: str) -> None:
    refused = post(client, FILTER % (part, f"[1, {value}]"))
    assert code(refused) == (422, "validation_failed")
    assert refused.json()["detail"] == f"body.filters.0.{part}.1: must be a finite number"


@pytest.mark.parametrize("part", ["at_least", "at_most"])
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "true", '"1"', "[]"])
def test_bounds_are_finite_numbers(client: Any, part: str, value: str) -> None:
    refused = post(client, FILTER % (part, value))
    assert code(refused) == (422, "validation_failed")
    assert "number" in refused.json()["detail"]


@pytest.mark.parametrize("bound", [2**53 + 1, 10**400, -(10**400), 1.5, 1e308])
def test_bounds_of_any_size_are_compared(client: Any, bound: float) -> None:
    answer = post(client, FILTER % ("at_least", json.dumps(bound)))
    assert answer.status_code == 200
    found = [one["item_id"] for one in answer.json()["items"]]
    assert found == [], "a1, of 1990, is the history"
    body = {"history": ["c1"], "filters": [{"attribute": "year", "at_least": bound}]}
    found = [one["item_id"] for one in client.recommend(**body).json()["items"]]
    assert found == (["a1"] if bound <= 1990 else [])


@pytest.mark.parametrize(
    "item_id",
    ["", " ", "\t", "\u3000", "\u200b\u2060", "\u0301", "a\nb", "\x7f", ".", "..", "x" * 257],
)
def test_ids_that_could_not_be_asked_for_are_refused(admin: Any, item_id: str) -> None:
    refused = onboard(admin, item(item_id), wait=0)
    assert code(refused) == (422, "validation_failed")
    assert refused.json()["errors"][0]["loc"] == ["body", "items", 0, "item_id"]


ODD_IDS = [
    "a/b",
    "/a",
    "a/",
    "a//b",
    "a/../b",
    "...",
    "50%",
    "%2F",
    "%252e",
    "a?b=c",
    "a#b",
    "a;b",
    "a+b c",
    " a",
    "é日本\U0001f9f5",
    "x:cancel",
    '"\\',
    "-1",
]


@pytest.mark.parametrize("item_id", ODD_IDS)
def test_ids_travel_in_paths_when_encoded(admin: Any, working: None, item_id: str) -> None:
    job = onboard(admin, item(item_id)).json()
    assert job["state"] == "live", job
    path = quote(item_id, safe="")
    assert admin.get(f"/v1/items/{path}").json()["item_id"] == item_id
    changed = admin.request("PATCH", f"/v1/admin/items/{path}", json={"attributes": {"a": 1}})
    assert changed.json()["item_id"] == item_id
    assert admin.request("DELETE", f"/v1/admin/items/{path}").json()["available"] is False
    assert admin.get(f"/v1/items/{path}").json()["attributes"] == {"a": 1}


@pytest.mark.parametrize(
    ("title", "stored"),
    [
        ("Two\nlines", "Two lines"),
        ("  a \r\n\t b\x00c ", "a b c"),
        ("x" * 1000, "x" * 1000),
        ("e\u0301", "\u00e9"),
    ],
)
def test_titles_are_one_line(admin: Any, working: None, title: str, stored: str) -> None:
    assert onboard(admin, item("n", title)).json()["state"] == "live"
    assert admin.get("/v1/items/n").json()["title"] == stored


def test_a_title_that_grows_beyond_the_limit_is_refused(admin: Any) -> None:
    refused = onboard(admin, item("n", "\U0001d160" * 400))
    assert refused.json()["detail"] == "body.items.0.title: at most 1000 characters after NFC"


def test_the_deadline_ends_the_wait_for_a_version(make_admin: Any) -> None:
    client = make_admin(min_version_wait_s=0.3)
    began = time.monotonic()
    late = client.recommend(history=["a1"], min_version=9, timeout_ms=50)
    assert code(late) == (504, "deadline_exceeded")
    assert time.monotonic() - began < 0.3
    began = time.monotonic()
    late = client.recommend(history=["a1"], min_version=9, timeout_ms=600)
    assert code(late) == (504, "deadline_exceeded")
    assert time.monotonic() - began > 0.55
    assert code(client.recommend(history=["a1"], min_version=9)) == (409, "version_not_served")


def test_a_long_deadline_waits_for_a_version_that_comes(make_admin: Any, parts: Any) -> None:
    client = make_admin(min_version_wait_s=0.01)
    store = parts.open()

    async def together() -> httpx.Response:
        import asyncio

        from gti_core.bundle.delta import Delta

        post = client._client.post
        body = {"history": ["a1"], "min_version": 2, "timeout_ms": 5000}
        waiting = asyncio.create_task(post("/v1/recommendations", json=body))
        await asyncio.sleep(0.2)
        store.versions.commit(1, "retire", Delta(parts.base.vocabulary, retired=("50",)))
        answer: httpx.Response = await waiting
        return answer

    try:
        answer = client.runner.run(together())
    finally:
        store.close()
    assert (answer.status_code, answer.json()["version"]) == (200, 2)


LEAKS = re.compile(r"pydantic|constrained|validator|function-|Input should|parse raw|Value error")
BODIES: list[Any] = [
    [],
    3,
    {},
    {"history": 3},
    {"history": [3, None, ""]},
    {"query": 3},
    {"history": [], "k": "3"},
    {"history": [], "k": 2.5},
    {"history": [], "explain": 1},
    {"history": [], "zz": 1},
    {"history": [], "timeout_ms": 10**30},
    {"history": [], "filters": [3]},
    {"history": [], "filters": [{"attribute": 1, "any_of": [{}], "at_least": "x"}]},
    {"history": [], "filters": [{"attribute": "a", "any_of": ["x" * 1001]}]},
    {"history": [], "diversity": {"attribute": "\ud800"}},
]


@pytest.mark.parametrize("body", BODIES)
def test_refusals_are_in_plain_words(client: Any, body: Any) -> None:
    refused = post(client, json.dumps(body))
    assert code(refused) == (422, "validation_failed")
    assert not LEAKS.search(refused.text), refused.text
    for fault in refused.json()["errors"]:
        assert not {"int", "float", "bool", "str"} & set(map(str, fault["loc"]))


def test_one_wrong_value_is_one_fault(client: Any) -> None:
    refused = post(client, FILTER % ("any_of", "[{}]"))
    assert refused.json()["errors"] == [
        {
            "loc": ["body", "filters", 0, "any_of", 0],
            "msg": "must be text, a number, true, false or null",
        }
    ]


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/v1/info", "/v1/items", "/v1/items/a1", "/docs", "/openapi.json"]
)
def test_head_is_get_without_a_body(client: Any, path: str) -> None:
    whole, head = client.get(path), client.request("HEAD", path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_head_where_there_is_no_get(client: Any) -> None:
    assert client.request("HEAD", "/v1/recommendations").status_code == 405
    assert client.request("HEAD", "/v1/items/nope").status_code == 404


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/recommendations", "POST"),
        ("/v1/admin/items", "POST"),
        ("/v1/admin/items/a1", "DELETE, PATCH"),
        ("/v1/admin/jobs", "GET, HEAD"),
        ("/livez", "GET, HEAD"),
    ],
)
@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "TRACE", "BREW"])
def test_a_wrong_method_is_told_every_right_one(
    client: Any, path: str, allowed: str, method: str
) -> None:
    refused = client.request(method, path)
    assert code(refused) == (405, "method_not_allowed")
    assert refused.headers["allow"] == allowed
