"""From a history or a search query to items. Knows no HTTP and no engine's insides."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from gti_core.catalog import Item
from gti_core.decoding import ScoredRow
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import ItemId
from service.admission import Admission
from service.attribute_filter import AttributeFilters, Condition
from service.engine.base import DecodeRequest, Engine, Selection, ServingModel
from service.engine.timings import Timings
from service.search import QueryEncoder
from service.slate import Cap, Nearest, capped, nearest

logger = logging.getLogger(__name__)

MOST_LISTED_ON_LOOP = 1000
"""Ids of a request that are looked up on the event loop; more take over a millisecond."""
FallbackReason = Literal["empty_history", "no_known_item"]


class UnknownItemsError(Exception):
    """A strict query names items that the catalogue lacks.

    Args:
        ids: each once, in order.
    """

    def __init__(self, ids: Sequence[ItemId]) -> None:
        super().__init__(f"{len(ids)} unknown items")
        self.ids = list(ids)


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
        include: the only items that may come back; None for all.
        exclude: items that do not come back.
        conditions: on the items' attributes; all must hold.
        cap: of items that share an attribute's value.
        explain: find each item's nearest one of the history.
        strict: refuse unknown ids instead of skipping them.
        deadline: when the answer is worth nothing any more, by `time.monotonic`; None: never.
    """

    history: Sequence[ItemId]
    k: int
    beam_width: int
    exclude_history: bool
    request_id: str
    text: str | None = None
    include: Sequence[ItemId] | None = None
    exclude: Sequence[ItemId] = ()
    conditions: Sequence[Condition] = ()
    cap: Cap | None = None
    explain: bool = False
    strict: bool = False
    deadline: float | None = None


@dataclass(frozen=True)
class Ranked:
    """An item found.

    Args:
        item: the item.
        score: log-probability in nats; None in a fallback.
        nearest: the item of the history nearest to it; None unless asked for.
    """

    item: Item
    score: float | None
    nearest: Nearest | None = None


@dataclass(frozen=True)
class _Limits:
    """What may come back, by catalogue row of one version."""

    excluded: frozenset[int]
    included: frozenset[int] | None
    selection: Selection | None

    def admits(self, row: int) -> bool:
        if row in self.excluded or (self.included is not None and row not in self.included):
            return False
        return self.selection is None or bool(self.selection.mask[row])


@dataclass(frozen=True)
class Recommendation:
    """The answer to a `Query`.

    Args:
        items: at most k, best first; fewer only when fewer items are admissible.
        version: version of model and catalogue.
        unknown_items: unknown ids of the history, each once, in order.
        unknown_count: history entries that were unknown.
        fallback_reason: why popular items were returned, or None.
        timings: the engine's; None when it was not asked.
        decoded: when the engine had answered, `time.monotonic`; in a fallback, when it began.
    """

    items: list[Ranked]
    version: int
    unknown_items: list[ItemId]
    unknown_count: int
    fallback_reason: FallbackReason | None
    timings: Timings | None = field(default=None, compare=False)
    decoded: float = field(default=0.0, compare=False)


class Recommender:
    """Answers queries with an engine.

    Args:
        engine: a started engine.
        prompt: the template that the engine's model was trained with.
        encoder: writes search prompts; None when the model can't search.
        admission: refuses what the engine could not do in time; None: nothing is refused.
        on_illegal: told how many items of an engine's answer may not come back, when any.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: AppendOnlyPrompt,
        encoder: QueryEncoder | None = None,
        admission: Admission | None = None,
        on_illegal: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._encoder = encoder
        self._admission = admission
        self._on_illegal = on_illegal
        self._filters = AttributeFilters()

    async def recommend(self, query: Query) -> Recommendation:
        """Recommend. A history with no known item gets the most popular items.

        Cancelling the awaiting task frees the engine's work.

        Raises:
            ValueError: a search query with a history, or without an encoder.
            UnknownItemsError: a strict query with unknown ids.
            QueryUnreadableError: nothing of the search query is a token of the model.
            OverloadError: there is more work under way than can be done in time.
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
        if query.strict:
            listed = (*query.history, *(query.include or ()), *query.exclude)
            missing = dict.fromkeys(item_id for item_id in listed if item_id not in catalog)
            if missing:
                raise UnknownItemsError(list(missing))
        count = len(query.include or ()) + len(query.exclude)
        if query.conditions or count > MOST_LISTED_ON_LOOP:
            # Looks through the catalogue when a filter is new.
            limits = await asyncio.to_thread(self._limits, model, query, known)
        else:
            limits = self._limits(model, query, known)
        reason: FallbackReason | None = None
        timings: Timings | None = None
        prompt: list[int] = []
        if query.text is not None:
            if self._encoder is None or query.history:
                raise ValueError("a search query needs an encoder, and takes no history")
            prompt = self._encoder.prompt_token_ids(query.text)
        elif known:
            prompt = self._prompt.token_ids([item.sid for item in known], model.vocabulary)
        else:
            reason = "no_known_item" if query.history else "empty_history"
        if reason is not None:
            decoded = time.monotonic()
            # Sorted once per version; with a large catalogue not something for the event loop.
            found = await asyncio.to_thread(_popular, model, query, limits)
        elif limits.included is not None and not limits.included:
            decoded, found = time.monotonic(), []
        else:
            request = _request(model, query, prompt, limits)
            timings = request.timings
            with self._admitted(query, len(prompt)):
                scored = await self._engine.decode(request)
            decoded = time.monotonic()
            found = self._admissible(model, query, scored, limits)
        items = [
            Ranked(item, score, nearest(item.sid, known) if query.explain else None)
            for item, score in found
        ]
        return Recommendation(
            items,
            model.version,
            list(dict.fromkeys(unknown)),
            len(unknown),
            reason,
            timings,
            decoded,
        )

    def _limits(self, model: ServingModel, query: Query, known: Sequence[Item]) -> _Limits:
        catalog = model.catalog

        def rows(ids: Sequence[ItemId]) -> frozenset[int]:
            return frozenset(catalog.row(item_id) for item_id in ids if item_id in catalog)

        seen = [item.item_id for item in known] if query.exclude_history else []
        selection = None
        if query.conditions:
            selection = self._filters.selection(catalog, query.conditions)
        included = None if query.include is None else rows(query.include)
        return _Limits(rows([*seen, *query.exclude]), included, selection)

    def _admissible(
        self, model: ServingModel, query: Query, found: Sequence[ScoredRow], limits: _Limits
    ) -> list[tuple[Item, float | None]]:
        """The items that an engine found. What it should not have found is left out and told."""
        items, ranked, illegal = model.catalog.items, [], []
        for one in found:
            if (
                0 <= one.row < len(items)
                and model.index.in_service(one.row)
                and limits.admits(one.row)
            ):
                ranked.append((items[one.row], one.logprob))
            else:
                illegal.append(one.row)
        if illegal:
            logger.error(
                "the engine returned %d items that are not in service in version %d or excluded "
                "by the request; dropped: catalogue rows %s",
                len(illegal),
                model.version,
                illegal[:10],
            )
            self._on_illegal(len(illegal))
        return _first(ranked, query)

    def _admitted(self, query: Query, tokens: int) -> AbstractContextManager[None]:
        if self._admission is None:
            return nullcontext()
        return self._admission.enter(query.beam_width, tokens, query.deadline)


def _request(
    model: ServingModel, query: Query, prompt: Sequence[int], limits: _Limits
) -> DecodeRequest:
    return DecodeRequest(
        model=model,
        # A client may send the same request id twice at a time; an engine may not.
        request_id=f"{query.request_id}-{uuid.uuid4().hex[:8]}",
        prompt_token_ids=prompt,
        # A cap takes its pick from all that the search has found.
        k=query.k if query.cap is None else query.beam_width,
        beam_width=query.beam_width,
        excluded_rows=limits.excluded,
        included_rows=limits.included,
        selection=limits.selection,
    )


def _popular(model: ServingModel, query: Query, limits: _Limits) -> list[tuple[Item, float | None]]:
    """The most popular items that may come back."""
    row = model.catalog.row
    admitted = (item for item in model.popular if limits.admits(row(item.item_id)))
    return _first(((item, None) for item in admitted), query)


def _first(
    ranked: Iterable[tuple[Item, float | None]], query: Query
) -> list[tuple[Item, float | None]]:
    """The best ``k`` that the query's cap lets through."""
    if query.cap is not None:
        ranked = capped(ranked, query.cap)
    return list(islice(ranked, query.k))
