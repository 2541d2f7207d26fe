"""From a history of item ids to recommended items. Knows no HTTP and no engine's insides."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from gti_core.catalog import Item
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import ItemId
from service.engine.base import DecodeRequest, Engine

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
    """

    history: Sequence[ItemId]
    k: int
    beam_width: int
    exclude_history: bool
    request_id: str


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
    """

    def __init__(self, engine: Engine, prompt: AppendOnlyPrompt) -> None:
        self._engine = engine
        self._prompt = prompt

    async def recommend(self, query: Query) -> Recommendation:
        """Recommend. A history with no known item gets the most popular items.

        Cancelling the awaiting task frees the engine's work.

        Raises:
            PromptTooLongError, EngineDeadError, EngineError: as `Engine.decode`.
        """
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
            rows = await self._engine.decode(
                DecodeRequest(
                    # A client may send the same request id twice at a time; an engine may not.
                    request_id=f"{query.request_id}-{uuid.uuid4().hex[:8]}",
                    prompt_token_ids=self._prompt.token_ids(
                        [item.sid for item in known], model.vocabulary
                    ),
                    k=query.k,
                    beam_width=query.beam_width,
                    excluded_rows=frozenset(catalog.row(item.item_id) for item in known)
                    if query.exclude_history
                    else frozenset(),
                )
            )
            items = [Ranked(catalog.items[found.row], found.logprob) for found in rows]
        else:
            reason = "no_known_item" if query.history else "empty_history"
            items = [Ranked(item, None) for item in islice(catalog.by_popularity, query.k)]
        return Recommendation(
            items, model.version, list(dict.fromkeys(unknown)), len(unknown), reason
        )
