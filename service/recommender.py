"""From a history or a search query to items. Knows no HTTP and no engine's insides."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gti_core.catalog import Item
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import ItemId
from service.engine.base import DecodeRequest, Engine, ServingModel
from service.search import QueryEncoder

FallbackReason = Literal["empty_history", "no_known_item"]


@dataclass(frozen=True)
class Query:
    """One request for recommendations, within the limits of the settings.

    Args:
        history: item ids, oldest first; may repeat, may hold unknown ids.
        k: items wanted, at least 1.
        beam_width: W, at least k.
        exclude_history: leave out the items of the history, all of it.
        request_id: id of the request, for logs. Need not be unique.
        text: a search query, cleaned; takes the place of the history, which must be empty.
    """

    history: Sequence[ItemId]
    k: int
    beam_width: int
    exclude_history: bool
    request_id: str
    text: str | None = None


@dataclass(frozen=True)
class Ranked:
    """An item found. ``score`` is a log-probability in nats, None in a fallback."""

    item: Item
    score: float | None


@dataclass(frozen=True)
class Recommendation:
    """The answer to a `Query`.

    Args:
        items: at most k, best first; fewer only when fewer items are admissible.
        version: version of model and catalogue.
        unknown_items: unknown ids of the history, each once, in order.
        unknown_count: history entries that were unknown.
        fallback_reason: why popular items were returned, or None.
    """

    items: list[Ranked]
    version: int
    unknown_items: list[ItemId]
    unknown_count: int
    fallback_reason: FallbackReason | None


class Recommender:
    """Answers queries with an engine.

    Args:
        engine: a started engine.
        prompt: the template that the engine's model was trained with.
        encoder: writes search prompts; None when the model can't search.
    """

    def __init__(
        self, engine: Engine, prompt: AppendOnlyPrompt, encoder: QueryEncoder | None = None
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._encoder = encoder

    async def recommend(self, query: Query) -> Recommendation:
        """Recommend. A history with no known item gets the most popular items.

        Cancelling the awaiting task frees the engine's work.

        Raises:
            ValueError: a search query with a history, or without an encoder.
            QueryUnreadableError: nothing of the search query is a token of the model.
            PromptTooLongError, EngineDeadError, EngineError: as `Engine.decode`.
        """
        if query.text is not None:
            return await self._search(query, query.text)
        # Taken once: a request is served wholly by one version.
        model = self._engine.model
        catalog = model.catalog
        known: list[Item] = []
        unknown: list[ItemId] = []
        for item_id in query.history:
            item = catalog.get(item_id)
            if item is None:
                unknown.append(item_id)
            else:
                known.append(item)
        reason: FallbackReason | None = None
        if known:
            prompt = self._prompt.token_ids([item.sid for item in known], model.vocabulary)
            seen = (
                frozenset(catalog.row(item.item_id) for item in known)
                if query.exclude_history
                else frozenset()
            )
            items = await self._decode(model, query, prompt, seen)
        else:
            reason = "no_known_item" if query.history else "empty_history"
            # Sorted once per version; with a large catalogue not something for the event loop.
            popular = await asyncio.to_thread(lambda: model.popular)
            items = [Ranked(item, None) for item in popular[: query.k]]
        return Recommendation(
            items, model.version, list(dict.fromkeys(unknown)), len(unknown), reason
        )

    async def _search(self, query: Query, text: str) -> Recommendation:
        if self._encoder is None or query.history:
            raise ValueError("a search query needs an encoder, and takes no history")
        model = self._engine.model
        prompt = self._encoder.prompt_token_ids(text)
        items = await self._decode(model, query, prompt, frozenset())
        return Recommendation(items, model.version, [], 0, None)

    async def _decode(
        self, model: ServingModel, query: Query, prompt: list[int], excluded: frozenset[int]
    ) -> list[Ranked]:
        rows = await self._engine.decode(
            DecodeRequest(
                model=model,
                # A client may send the same request id twice at a time; an engine may not.
                request_id=f"{query.request_id}-{uuid.uuid4().hex[:8]}",
                prompt_token_ids=prompt,
                k=query.k,
                beam_width=query.beam_width,
                excluded_rows=excluded,
            )
        )
        return [Ranked(model.catalog.items[found.row], found.logprob) for found in rows]
