"""Filters, lists, caps, explanations, deadlines, batches and the list of items, over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gti_core.catalog import Item, ItemCatalog
from gti_core.prompts import AppendOnlyPrompt
from gti_core.vocabulary import SidVocabulary
from service.context import ServingContext
from service.engine.base import DecodeRequest
from service.engine.fake import FakeEngine

GENRES = ("Drama", "Comedy", "Sci-Fi")


@pytest.fixture
def context(tiny_vocabulary: SidVocabulary) -> ServingContext:
    items = [
        Item(
            f"i{a}{b}{c}",
            (a, b, c),
            f"The {GENRES[(a + b) % 3]} of {a}{b}{c}",
            attributes={"genres": [GENRES[(a + b) % 3], GENRES[c % 3]], "year": 1990 + a * 4 + c},
            popularity=a * 7 + b * 3 + c,
        )
        for a in range(4)
        for b in range(3)
        for c in range(4)
    ]
    prompt = AppendOnlyPrompt("Next:", (3, 1, 4), max_history=4, drop=2)
    return ServingContext.build("tiny", "0" * 64, ItemCatalog(items), tiny_vocabulary, prompt)


@pytest.fixture
def shop(make_client: Any, context: ServingContext, tmp_path: Any) -> Any:
    engine = FakeEngine(context.model(tmp_path))
    return make_client(engine, context=context).wait_ready()


def ids(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [item["item_id"] for item in response.json()["items"]]


def test_filters_leave_the_order_of_what_is_left(shop: Any, context: ServingContext) -> None:
    whole = ids(shop.recommend(history=["i000"], k=47, beam_width=60))
    some = ids(
        shop.recommend(
            history=["i000"],
            k=47,
            beam_width=60,
            filters=[
                {"attribute": "genres", "any_of": ["Comedy"]},
                {"attribute": "year", "at_least": 1994, "at_most": 2000},
            ],
        )
    )
    fitting = {
        item.item_id
        for item in context.catalog
        if "Comedy" in item.attributes["genres"] and 1994 <= item.attributes["year"] <= 2000
    }
    assert some == [item_id for item_id in whole if item_id in fitting]
    assert len(some) > 3


def test_lists_of_items(shop: Any) -> None:
    whole = ids(shop.recommend(history=["i000"], k=47, beam_width=60))
    chosen = ["i123", "i321", "i000", "nobody", "i111"]
    found = shop.recommend(history=["i000"], include_items=chosen, k=10)
    assert ids(found) == [item_id for item_id in whole if item_id in chosen]
    assert found.json()["shortfall"] == 7
    without = ids(shop.recommend(history=["i000"], exclude_items=whole[:5], k=5))
    assert without == whole[5:10]
    assert ids(shop.recommend(history=["i000"], include_items=[], k=3)) == []
    assert ids(shop.recommend(history=["i000"], include_items=["nobody"], k=3)) == []
    both = shop.recommend(history=["i000"], include_items=chosen, exclude_items=["i123"], k=10)
    assert "i123" not in ids(both)


def test_a_fallback_obeys_them_too(shop: Any, context: ServingContext) -> None:
    body = {"filters": [{"attribute": "year", "at_most": 1991}], "exclude_items": ["i021"]}
    found = shop.recommend(history=[], k=5, **body)
    assert found.json()["fallback"]
    expected = sorted(
        (i for i in context.catalog if i.attributes["year"] <= 1991 and i.item_id != "i021"),
        key=lambda item: -item.popularity,
    )
    assert ids(found) == [item.item_id for item in expected[:5]]
    assert ids(shop.recommend(history=["x"], include_items=["i111", "i323"])) == ["i323", "i111"]


def test_a_cap_on_an_attribute(shop: Any, context: ServingContext) -> None:
    body = shop.recommend(
        history=["i000"], k=6, diversity={"attribute": "genres", "most": 2}, beam_width=60
    )
    found = [context.catalog.get(item_id) for item_id in ids(body)]
    for genre in GENRES:
        assert sum(genre in item.attributes["genres"] for item in found if item) <= 2
    assert [item["rank"] for item in body.json()["items"]] == list(range(1, len(found) + 1))
    wide = shop.recommend(history=["i000"], k=10, diversity={"attribute": "genres", "most": 2})
    assert wide.json()["beam_width"] == 30


def test_explanations(shop: Any) -> None:
    body = shop.recommend(history=["i000", "i111", "i112"], k=40, explain=True).json()
    by_id = {item["item_id"]: item["explanation"] for item in body["items"]}
    assert by_id["i113"] == {"nearest_item": "i112", "shared_levels": 2}
    assert by_id["i101"] == {"nearest_item": "i112", "shared_levels": 1}
    assert by_id["i200"] == {"nearest_item": None, "shared_levels": 0}
    plain = shop.recommend(history=["i000"], k=2).json()
    assert all(item["explanation"] is None for item in plain["items"])


@pytest.mark.parametrize("where", ["history", "include_items", "exclude_items"])
def test_strict_requests_name_what_is_unknown(shop: Any, where: str) -> None:
    body = {"history": ["i000"]} | {where: ["i000", "ghost", "ghost", "wraith"]}
    refused = shop.recommend(strict=True, **body)
    assert refused.status_code == 422
    assert refused.json()["code"] == "unknown_items"
    assert refused.json()["unknown_items"] == ["ghost", "wraith"]
    assert shop.recommend(strict=False, **body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"filters": [{"attribute": "year"}]},
        {"filters": [{"attribute": "", "any_of": ["a"]}]},
        {"filters": [{"attribute": "year", "any_of": []}]},
        {"filters": [{"attribute": "year", "any_of": [{"a": 1}]}]},
        {"filters": [{"attribute": "year", "at_least": "1990"}]},
        {"filters": [{"attribute": "year", "like": "1990"}]},
        {"filters": [{"attribute": "year", "at_least": 1}] * 17},
        {"diversity": {"attribute": "genres", "most": 0}},
        {"timeout_ms": 0},
        {"include_items": [7]},
        {"exclude_items": ["x"] * 10_001},
    ],
)
def test_bad_options_are_422(shop: Any, body: dict[str, Any]) -> None:
    refused = shop.recommend(history=["i000"], **body)
    assert refused.status_code == 422
    assert refused.json()["code"] == "validation_failed"


class SlowEngine(FakeEngine):
    """Never answers, and says when it was given up."""

    given_up = 0

    async def decode(self, request: DecodeRequest) -> Any:
        try:
            await asyncio.sleep(3600)
        finally:
            self.given_up += 1


def test_a_deadline_is_504_and_frees_the_engine(
    make_client: Any, context: ServingContext, tmp_path: Any
) -> None:
    engine = SlowEngine(context.model(tmp_path))
    client = make_client(engine, context=context).wait_ready()
    late = client.recommend(history=["i000"], timeout_ms=30)
    assert late.status_code == 504
    assert late.json()["code"] == "deadline_exceeded"
    assert engine.given_up == 1


def test_a_batch_answers_each_in_order(shop: Any) -> None:
    requests = [
        {"history": ["i000"], "k": 3},
        {"history": [], "k": 2},
        {"history": ["ghost"], "strict": True},
        {"history": ["i000"], "k": 10_000},
        {"query": "red shoes"},
        {"history": ["i111"], "k": 4},
    ]
    body = shop.post("/v1/recommendations:batch", json={"requests": requests})
    assert body.status_code == 200
    results = body.json()["results"]
    assert [result["status"] for result in results] == [200, 200, 422, 422, 422, 200]
    assert [result["problem"] and result["problem"]["code"] for result in results] == [
        None,
        None,
        "unknown_items",
        "validation_failed",
        "search_unavailable",
        None,
    ]
    for request, result in zip(requests, results, strict=True):
        if result["status"] == 200:
            alone = shop.recommend(**request).json()
            for field in ("items", "fallback", "version"):
                assert result["answer"][field] == alone[field]


def test_a_batch_is_bounded(shop: Any) -> None:
    for requests in ([], [{"history": []}] * 101, [{"history": 3}], "x"):
        refused = shop.post("/v1/recommendations:batch", json={"requests": requests})
        assert refused.status_code == 422


def test_a_batch_waits_for_the_engine_as_a_whole(make_client: Any, context: ServingContext) -> None:
    def broken(_: Any) -> Any:
        raise OSError("no model")

    client = make_client(broken, context=context)
    client.sleep(0.1)
    refused = client.post("/v1/recommendations:batch", json={"requests": [{"history": []}]})
    assert refused.status_code == 503


def test_items_page_by_page(shop: Any, context: ServingContext) -> None:
    seen: list[str] = []
    cursor: str | None = None
    for _ in range(20):
        page = shop.get("/v1/items", params={"limit": 7} | ({"cursor": cursor} if cursor else {}))
        assert page.status_code == 200
        seen += [item["item_id"] for item in page.json()["items"]]
        cursor = page.json()["next_cursor"]
        if cursor is None:
            break
    assert seen == [item.item_id for item in context.catalog]
    assert shop.get("/v1/items", params={"cursor": "99999"}).json()["items"] == []


def test_items_are_searched_by_words_of_their_title(shop: Any, context: ServingContext) -> None:
    found = shop.get("/v1/items", params={"q": "  COMEDY 0", "limit": 500}).json()["items"]
    expected = [i.item_id for i in context.catalog if "Comedy" in i.title and "0" in i.title]
    assert [item["item_id"] for item in found] == expected
    assert shop.get("/v1/items", params={"q": "nothing like it"}).json()["items"] == []
    assert shop.get("/v1/items", params={"available": "false"}).json()["items"] == []
    assert len(shop.get("/v1/items", params={"available": "true"}).json()["items"]) == 48


@pytest.mark.parametrize(
    "params", [{"limit": 0}, {"limit": 501}, {"cursor": "x"}, {"q": "a" * 201}, {"available": "?"}]
)
def test_bad_pages_are_422(shop: Any, params: dict[str, Any]) -> None:
    assert shop.get("/v1/items", params=params).status_code == 422
