"""POST /v1/recommendations over the fake engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gti_core.catalog import ItemCatalog
from gti_core.decoding import exhaustive_search
from service.context import ServingContext
from service.engine.fake import FakeEngine, fake_logprobs

IDS = ("a1", "a2", "a3", "b1", "b2", "c1", "c2", "d1", "d2", "e/1", "f1", "50")


def ids(response: Any) -> list[str]:
    return [item["item_id"] for item in response.json()["items"]]


def test_answer_is_whole(client: Any, tiny_catalog: ItemCatalog) -> None:
    response = client.recommend(history=["a1", "c1"], k=4)
    assert response.status_code == 200
    body = response.json()
    assert set(body) == {
        "items",
        "version",
        "request_id",
        "fallback",
        "fallback_reason",
        "unknown_items",
        "unknown_count",
        "shortfall",
        "beam_width",
        "took_ms",
        "timings",
    }
    assert [item["rank"] for item in body["items"]] == [1, 2, 3, 4]
    scores = [item["score"] for item in body["items"]]
    assert scores == sorted(scores, reverse=True)
    assert all(score < 0 for score in scores)
    for item in body["items"]:
        known = tiny_catalog.get(item["item_id"])
        assert known is not None
        assert (known.title, list(known.sid)) == (item["title"], item["semantic_id"])
    assert body["version"] == 1
    assert body["fallback"] is False
    assert body["fallback_reason"] is None
    assert body["unknown_items"] == []
    assert body["shortfall"] == 0
    assert body["beam_width"] == 20
    assert body["request_id"] == response.headers["x-request-id"]


def test_answer_is_the_exhaustive_ranking(client: Any, tiny_context: ServingContext) -> None:
    """W >= N, so the service must return what scoring every item returns, scores included."""
    history = ["a1", "c1"]
    sids = [tiny_context.catalog.items[tiny_context.catalog.row(i)].sid for i in history]
    prompt = tiny_context.prompt.token_ids(sids, tiny_context.vocabulary)
    expected = exhaustive_search(
        lambda prefixes: fake_logprobs(prompt, prefixes, tiny_context.vocabulary),
        [item.sid for item in tiny_context.catalog],
        tiny_context.vocabulary,
        10,
        excluded=frozenset(sids),
    )
    items = client.recommend(history=history, k=10).json()["items"]
    assert [tuple(item["semantic_id"]) for item in items] == [sid for sid, _ in expected]
    assert [item["score"] for item in items] == pytest.approx([s for _, s in expected], abs=1e-5)


def test_same_question_same_answer(client: Any) -> None:
    first, second = (client.recommend(history=["b1", "50"], k=5).json() for _ in range(2))
    for field in ("took_ms", "timings", "request_id"):
        del first[field], second[field]
    assert first == second


def test_history_matters(client: Any) -> None:
    by_order = {
        tuple(ids(client.recommend(history=h, k=8, exclude_history=False)))
        for h in (["a1", "b1"], ["b1", "a1"], ["b1"])
    }
    assert len(by_order) == 3


def test_exclude_history(client: Any) -> None:
    history = ["a1", "c1", "f1", "a1"]
    without = ids(client.recommend(history=history, k=12))
    assert sorted(without) == sorted(set(IDS) - set(history))
    with_history = ids(client.recommend(history=history, k=12, exclude_history=False))
    assert sorted(with_history) == sorted(IDS)


def test_excludes_items_that_no_longer_fit_the_prompt(client: Any) -> None:
    """The prompt reads the latest four items; the exclusion covers all of them."""
    history = ["d1", "d2", "a1", "a2", "a3", "b1", "b2"]
    assert set(ids(client.recommend(history=history, k=12))) == set(IDS) - set(history)


def test_shortfall_is_stated(client: Any) -> None:
    body = client.recommend(history=["a1"], k=100).json()
    assert len(body["items"]) == 11
    assert body["shortfall"] == 89
    assert body["beam_width"] == 100
    everything = client.recommend(history=list(IDS), k=3).json()
    assert everything["items"] == []
    assert everything["shortfall"] == 3
    assert everything["fallback"] is False


def test_empty_history_gets_popular_items(client: Any) -> None:
    body = client.recommend(history=[], k=5).json()
    # a3 90, 50 80, then c1 and c2 with 70 in row order, f1 60.
    assert [item["item_id"] for item in body["items"]] == ["a3", "50", "c1", "c2", "f1"]
    assert [item["score"] for item in body["items"]] == [None] * 5
    assert [item["rank"] for item in body["items"]] == [1, 2, 3, 4, 5]
    assert body["fallback"] is True
    assert body["fallback_reason"] == "empty_history"
    assert body["beam_width"] is None


def test_unknown_ids_are_skipped_and_reported(client: Any) -> None:
    unknown = ["nope", "-1", "99999999999999999999", "nope", "<|sid_0_0|>", "<|im_start|>", " a1"]
    body = client.recommend(history=["a1", *unknown, "c1"], k=5).json()
    clean = client.recommend(history=["a1", "c1"], k=5).json()
    assert body["unknown_items"] == list(dict.fromkeys(unknown))
    assert body["unknown_count"] == 7
    assert body["items"] == clean["items"]
    assert body["fallback"] is False


def test_only_unknown_ids_fall_back(client: Any) -> None:
    body = client.recommend(history=["x", "y", "x"], k=20).json()
    assert body["fallback_reason"] == "no_known_item"
    assert len(body["items"]) == 12
    assert body["shortfall"] == 8
    assert body["unknown_items"] == ["x", "y"]
    assert body["unknown_count"] == 3


def test_default_k_and_beam(make_client: Any, fake_engine: FakeEngine) -> None:
    client = make_client(fake_engine, default_beam_width=2).wait_ready()
    body = client.recommend(history=["a1"]).json()
    assert len(body["items"]) == 10
    assert body["beam_width"] == 10
    assert client.recommend(history=["a1"], k=1).json()["beam_width"] == 2
    assert client.recommend(history=["a1"], k=1, beam_width=256).json()["beam_width"] == 256


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 11])
def test_k_items_come_back_at_the_narrowest_beam(client: Any, k: int) -> None:
    body = client.recommend(history=["a1"], k=k, beam_width=k).json()
    assert len(body["items"]) == k
    assert body["shortfall"] == 0


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    history=st.lists(st.one_of(st.sampled_from(IDS), st.text(min_size=1, max_size=8)), max_size=12),
    k=st.integers(1, 15),
    beam_width=st.none() | st.integers(15, 40),
    exclude_history=st.booleans(),
)
def test_only_admissible_items_come_back(
    client: Any, history: list[str], k: int, beam_width: int | None, exclude_history: bool
) -> None:
    response = client.recommend(
        history=history, k=k, beam_width=beam_width, exclude_history=exclude_history
    )
    assert response.status_code == 200
    body = response.json()
    found = ids(response)
    barred = set(history) if exclude_history else set()
    admissible = set(IDS) - barred
    assert set(found) <= admissible
    assert len(set(found)) == len(found) == min(k, len(admissible))
    assert body["shortfall"] == k - len(found)
    assert body["unknown_count"] == sum(item not in IDS for item in history)


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({}, ["body"]),
        ({"history": None}, ["body"]),
        ({"history": "a1"}, ["body", "history"]),
        ({"history": {"0": "a1"}}, ["body", "history"]),
        ({"history": [50]}, ["body", "history", 0]),
        ({"history": ["a1", None]}, ["body", "history", 1]),
        ({"history": ["a1", True]}, ["body", "history", 1]),
        ({"history": [["a1"]]}, ["body", "history", 0]),
        ({"history": [""]}, ["body", "history", 0]),
        ({"history": ["x" * 257]}, ["body", "history", 0]),
        ({"history": ["a1"] * 1001}, ["body", "history"]),
        ({"history": ["a1"], "k": 0}, ["body", "k"]),
        ({"history": ["a1"], "k": -5}, ["body", "k"]),
        ({"history": ["a1"], "k": 10000}, ["body", "k"]),
        ({"history": ["a1"], "k": 10**300}, ["body", "k"]),
        ({"history": ["a1"], "k": "10"}, ["body", "k"]),
        ({"history": ["a1"], "k": 10.0}, ["body", "k"]),
        ({"history": ["a1"], "k": True}, ["body", "k"]),
        ({"history": ["a1"], "k": None}, ["body", "k"]),
        ({"history": ["a1"], "k": 5, "beam_width": 4}, ["body", "beam_width"]),
        ({"history": ["a1"], "k": 5, "beam_width": 257}, ["body", "beam_width"]),
        ({"history": ["a1"], "k": 5, "beam_width": 0}, ["body", "beam_width"]),
        ({"history": ["a1"], "exclude_history": "yes"}, ["body", "exclude_history"]),
        ({"history": ["a1"], "exclude_history": 1}, ["body", "exclude_history"]),
        ({"history": ["a1"], "limit": 3}, ["body", "limit"]),
        ([], ["body"]),
        ("a1", ["body"]),
        (7, ["body"]),
        (None, ["body"]),
    ],
)
def test_invalid_requests(client: Any, body: Any, loc: list[Any]) -> None:
    response = client.post("/v1/recommendations", json=body)
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["code"] == "validation_failed"
    assert loc in [entry["loc"] for entry in problem["errors"]]


def test_a_number_as_id_says_how_to_write_it(client: Any) -> None:
    problem = client.recommend(history=[50]).json()
    assert problem["errors"] == [
        {"loc": ["body", "history", 0], "msg": 'item ids are strings: send "50", not 50'}
    ]


def test_limits_of_the_settings_hold(make_client: Any, fake_engine: FakeEngine) -> None:
    client = make_client(fake_engine, max_k=4, max_history=2, max_beam_width=21).wait_ready()
    assert client.recommend(history=["a1", "a2"], k=4, beam_width=21).status_code == 200
    assert client.recommend(history=["a1"], k=5).status_code == 422
    assert client.recommend(history=["a1"] * 3).status_code == 422
    assert client.recommend(history=["a1"], k=1, beam_width=22).status_code == 422


def test_many_faults_are_counted_not_listed(client: Any) -> None:
    problem = client.recommend(history=[1] * 50).json()
    assert len(problem["errors"]) == 20
    assert problem["detail"].endswith("(and 49 more)")


RAW = {
    "truncated": b'{"history": ["a1"',
    "empty object key": b"{:1}",
    "not utf-8": b'{"history": ["\xff\xfe"]}',
    "deep": b"[" * 100_000,
    "deep and closed": b"[" * 50_000 + b"]" * 50_000,
    "digits": b'{"history": ["a1"], "k": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", RAW)
def test_malformed_bodies(client: Any, name: str) -> None:
    response = client.post(
        "/v1/recommendations", content=RAW[name], headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["code"] == "malformed_body"


@pytest.mark.parametrize(
    "content",
    [
        b'{"history": ["a1"], "k": NaN}',
        b'{"history": ["a1"], "k": Infinity}',
        b'{"history": ["a1"], "k": 1e999}',
        b'{"history": ["\\ud800"]}',
        b'{"history": ["a1"], "\\ud800": 1}',
        b"",
    ],
)
def test_json_that_is_no_request(client: Any, content: bytes) -> None:
    response = client.post(
        "/v1/recommendations", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 422
    assert response.json()["code"] == "validation_failed"


def test_nul_and_control_characters_are_ids_like_any(client: Any) -> None:
    body = client.recommend(history=["a1", "\x00", "\n", "\U0001f600"], k=2).json()
    assert body["unknown_items"] == ["\x00", "\n", "\U0001f600"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_body_must_be_declared_as_json(client: Any, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = client.post(
        "/v1/recommendations", content=json.dumps({"history": []}), headers=headers
    )
    assert response.status_code == 415
    assert response.json()["code"] == "unsupported_media_type"
    assert "Content-Type: application/json" in response.json()["detail"]
