"""What a new item is to be found by: its own text, and histories of the known items like it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gti_core.catalog import Item
from gti_core.prompts import AppendOnlyPrompt, SearchPrompt
from gti_core.text import clean_text
from gti_core.types import FloatArray, IntArray, LongArray
from gti_core.vocabulary import SidVocabulary

if TYPE_CHECKING:
    from gti_core.lm import SidLM

MAX_TEXT_CHARS = 500
"""Of a search prompt made of an item's text."""


@dataclass(frozen=True)
class EvidenceOptions:
    """How evidence is put together.

    Args:
        histories: made-up histories per item and length.
        lengths: items of each.
        neighbours: known items that they are drawn from.
        wanted_text: probability wanted after the item's own text.
        wanted_made_up: after a made-up history.
        wanted_logged: share of a neighbour's own probability wanted where the neighbour was chosen.
        same_prefix: most states of other items with the same prefix.
        elsewhere: most states of other prefixes, and of other levels.
    """

    histories: int = 3
    lengths: tuple[int, ...] = (1, 2, 4)
    neighbours: int = 12
    wanted_text: float = 0.8
    wanted_made_up: float = 0.6
    wanted_logged: float = 0.1
    same_prefix: int = 256
    elsewhere: int = 512


@dataclass(frozen=True, eq=False)
class OwnPrompts:
    """What a new item is to be found by, as token ids.

    Args:
        texts: prompts of its own text.
        histories: of items that resemble it, made up.
        seen: catalogue rows of each history.
    """

    texts: Sequence[Sequence[int]]
    histories: Sequence[Sequence[int]]
    seen: Sequence[frozenset[int]]


def made_up_histories(
    neighbours: LongArray, weights: FloatArray, count: int, length: int, rng: random.Random
) -> list[list[int]]:
    """Histories of items that resemble one item: catalogue rows, the likeliest mostly last.

    Args:
        neighbours: catalogue rows, [R].
        weights: chance of each, not normalized, [R].
        count: histories wanted.
        length: items of each.
        rng: draws.
    """
    histories = []
    rows = neighbours.tolist()
    for _ in range(count):
        left, chances, history = list(rows), weights.tolist(), []
        for _ in range(min(length, len(rows))):
            place = rng.choices(range(len(left)), chances)[0]
            history.append(left.pop(place))
            chances.pop(place)
        history.reverse()
        histories.append(history)
    return histories


def history_prompts(
    histories: Sequence[Sequence[int]], sids: IntArray, prompt: AppendOnlyPrompt, lm: SidLM
) -> list[list[int]]:
    """Prompts of histories of catalogue rows."""
    return [
        prompt.token_ids([tuple(sids[row].tolist()) for row in history], lm.vocabulary)
        for history in histories
    ]


def text_prompts(
    item: Item, tokenizer: Any, search: SearchPrompt | None, vocabulary: SidVocabulary
) -> list[list[int]]:
    """Prompts made of an item's own text, as token ids.

    Args:
        item: with text.
        tokenizer: the backbone's.
        search: the search template; None for a model that was not trained for search.
        vocabulary: SID vocabulary.
    """
    from gti_core.grounding.corpus import TO_SID, GroundingCorpus, description_of, families_of
    from gti_core.lm import encode_text

    prompts: list[list[int]] = []
    if search is not None:
        for text in (item.title, f"{item.title} {description_of(item)}"):
            cleaned = clean_text(text, MAX_TEXT_CHARS)
            if cleaned:
                prompts.append(search.token_ids(encode_text(tokenizer, cleaned)))
    whole = replace(item, sid=(0,) * vocabulary.levels)
    families = [family for family in families_of(whole) if family in TO_SID]
    if families:
        corpus = GroundingCorpus([whole], vocabulary, tokenizer)
        prompts.extend(list(corpus.example(0, family).prompt) for family in families)
    return prompts
