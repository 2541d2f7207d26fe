"""Recommender: what reaches the engine, and what comes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from gti_core.catalog import ItemCatalog
from gti_core.decoding import ScoredRow
from gti_core.prompts import SearchPrompt
from service.context import ServingContext
from service.engine.base import DecodeRequest, ServingModel
from service.engine.fake import FakeEngine
from service.recommender import Query, Recommendation, Recommender
from service.search import QueryEncoder, QueryUnreadableError


class SpyEngine(FakeEngine):
    """Keeps the requests it gets."""

    def __init__(self, model: ServingModel) -> None:
        super().__init__(model)
        self.requests: list[DecodeRequest] = []

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        self.requests.append(request)
        return await super().decode(request)


@pytest.fixture
def spy(tiny_model: ServingModel) -> SpyEngine:
    return SpyEngine(tiny_model)


def ask(spy: SpyEngine, context: ServingContext, **query: Any) -> Recommendation:
    async def work() -> Recommendation:
        await spy.start()
        options = {"k": 2, "beam_width": 12, "exclude_history": True, "request_id": "r"} | query
        return await Recommender(spy, context.prompt).recommend(Query(**options))

    return asyncio.run(work())


def test_prompt_holds_known_items_oldest_first(
    spy: SpyEngine, tiny_context: ServingContext
) -> None:
    answer = ask(spy, tiny_context, history=["c1", "zzz", "a2", "c1"])
    [request] = spy.requests
    # Instruction 3 1 4; level offsets 16, 21, 25; c1 is (1, 0, 0), a2 is (0, 0, 1).
    assert request.prompt_token_ids == [3, 1, 4, 17, 21, 25, 16, 21, 26, 17, 21, 25]
    assert request.excluded_rows == frozenset({5, 1})
    assert (request.k, request.beam_width) == (2, 12)
    assert answer.unknown_items == ["zzz"]


def test_long_history_loses_its_oldest_items(spy: SpyEngine, tiny_context: ServingContext) -> None:
    ask(spy, tiny_context, history=["a1", "a2", "a3", "b1", "b2"], exclude_history=False)
    [request] = spy.requests
    # Four fit, two are dropped at a time: a3, b1, b2 stay.
    assert request.prompt_token_ids == [3, 1, 4, 16, 21, 27, 16, 22, 25, 16, 23, 25]
    assert request.excluded_rows == frozenset()


def test_fallback_asks_no_engine(spy: SpyEngine, tiny_context: ServingContext) -> None:
    answer = ask(spy, tiny_context, history=["x"])
    assert spy.requests == []
    assert answer.fallback_reason == "no_known_item"
    assert [found.item.item_id for found in answer.items] == ["a3", "50"]
    assert [found.score for found in answer.items] == [None, None]


@pytest.fixture
def encoder(tiny_context: ServingContext) -> QueryEncoder:
    words = {"for": 1, "item": 2, "red": 3, "tape": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="item"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    prompt = SearchPrompt("for", "item", (1,), (2,))
    return QueryEncoder(tokenizer, prompt, tiny_context.vocabulary)


def search(
    spy: SpyEngine, context: ServingContext, encoder: QueryEncoder | None, **query: Any
) -> Recommendation:
    async def work() -> Recommendation:
        await spy.start()
        options = {"history": (), "k": 2, "beam_width": 12, "request_id": "r", "text": "red tape"}
        recommender = Recommender(spy, context.prompt, encoder)
        return await recommender.recommend(Query(**{"exclude_history": True, **options, **query}))

    return asyncio.run(work())


def test_query_takes_the_place_of_the_history(
    spy: SpyEngine, tiny_context: ServingContext, encoder: QueryEncoder
) -> None:
    answer = search(spy, tiny_context, encoder)
    [request] = spy.requests
    assert request.prompt_token_ids == [1, 3, 4, 2]
    assert request.excluded_rows == frozenset()
    assert (request.k, request.beam_width) == (2, 12)
    assert request.request_id.startswith("r-")
    assert len(answer.items) == 2
    assert all(found.score is not None for found in answer.items)
    bare = replace(answer, items=[])
    assert bare == Recommendation([], 1, [], 0, None)


def test_query_with_a_history_or_without_an_encoder(
    spy: SpyEngine, tiny_context: ServingContext, encoder: QueryEncoder
) -> None:
    with pytest.raises(ValueError, match="takes no history"):
        search(spy, tiny_context, encoder, history=["a1"])
    with pytest.raises(ValueError, match="needs an encoder"):
        search(spy, tiny_context, None)
    with pytest.raises(QueryUnreadableError):
        search(spy, tiny_context, encoder, text="\u2003")
    assert spy.requests == []


def test_items_out_of_service_never_come_back_but_stay_known(
    spy: SpyEngine, tiny_model: ServingModel, tiny_context: ServingContext
) -> None:
    # a3 and 50, the most popular, and c1 go.
    index = tiny_model.index.with_availability([2, 11, 5], False)
    second = replace(tiny_model, index=index, version=2)

    async def work() -> None:
        await spy.start()
        await spy.publish(second)
        recommender = Recommender(spy, tiny_context.prompt)
        fallback = await recommender.recommend(Query(["x"], 2, 12, True, "r"))
        assert [found.item.item_id for found in fallback.items] == ["c2", "f1"]
        assert fallback.version == 2
        answer = await recommender.recommend(Query(["c1", "a3"], 12, 12, False, "r"))
        assert answer.unknown_items == []
        assert {found.item.item_id for found in answer.items}.isdisjoint({"a3", "50", "c1"})
        assert len(answer.items) == 9
        [request] = spy.requests
        assert request.prompt_token_ids == [3, 1, 4, 17, 21, 25, 16, 21, 27]

    asyncio.run(work())


def test_a_request_is_served_wholly_by_the_version_it_began_with(
    tiny_model: ServingModel, tiny_context: ServingContext
) -> None:
    renamed = [replace(item, item_id=f"{item.item_id}!") for item in tiny_model.catalog]
    second = replace(tiny_model, catalog=ItemCatalog(renamed), version=2)

    async def work() -> None:
        engine = SpyEngine(tiny_model)
        await engine.start()
        recommender = Recommender(engine, tiny_context.prompt)
        query = Query(["c1"], 3, 12, True, "r")
        alone = await recommender.recommend(query)
        under_way = asyncio.create_task(recommender.recommend(query))
        await asyncio.sleep(0)
        assert len(engine.requests) == 2
        await engine.publish(second)
        assert await under_way == alone
        later = await recommender.recommend(replace(query, history=["c1!"]))
        assert later.version == 2
        assert [found.item.item_id for found in later.items] == [
            f"{found.item.item_id}!" for found in alone.items
        ]

    asyncio.run(work())
