"""The grounding corpus: pairs (item text, semantic ID), in both directions (six families).

The wording is this project's own; the families are the paper's: title, description, and title
plus description, each to the SID and from the SID.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gti_core.catalog import Item
from gti_core.errors import DataError
from gti_core.lm import encode_text
from gti_core.text import clean_text
from gti_core.vocabulary import SidVocabulary

FAMILIES = (
    "title_to_sid",
    "description_to_sid",
    "both_to_sid",
    "sid_to_title",
    "sid_to_description",
    "sid_to_both",
)
TO_SID = FAMILIES[:3]
FROM_SID = FAMILIES[3:]

MAX_TITLE_CHARS = 200
MAX_DESCRIPTION_CHARS = 600


@dataclass(frozen=True)
class Example:
    """A prompt and its answer.

    Args:
        prompt: token ids that are read.
        answer: token ids that are learned.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def description_of(item: Item) -> str:
    """The item's description, else its attributes as text, else ""."""
    if item.description.strip():
        return clean_text(item.description, MAX_DESCRIPTION_CHARS)
    parts = []
    for name, value in sorted(item.attributes.items()):
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if text:
            parts.append(f"{name}: {text}")
    return clean_text("; ".join(parts), MAX_DESCRIPTION_CHARS)


def text_of(item: Item) -> str:
    """Title and description as one text, cleaned; the item's id when there is neither."""
    title = clean_text(item.title, MAX_TITLE_CHARS)
    parts = [part for part in (title, description_of(item)) if part]
    return ". ".join(parts) or clean_text(item.item_id, MAX_TITLE_CHARS)


def families_of(item: Item) -> list[str]:
    """Families for which the item has text."""
    has = {"title": bool(item.title.strip()), "description": bool(description_of(item))}
    has["both"] = has["title"] and has["description"]
    return [
        family
        for family in FAMILIES
        if has[next(part for part in family.split("_") if part not in ("to", "sid"))]
    ]


class GroundingCorpus:
    """Examples of all families for a list of items.

    Args:
        items: items with text; items without any are refused.
        vocabulary: SID vocabulary.
        tokenizer: the backbone's tokenizer, without SID tokens.

    Raises:
        DataError: an item has neither title, description nor attributes.
    """

    def __init__(self, items: Sequence[Item], vocabulary: SidVocabulary, tokenizer: Any) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._items = list(items)
        self._families = [families_of(item) for item in self._items]
        for item, families in zip(self._items, self._families, strict=True):
            if not families:
                raise DataError(f"item {item.item_id!r} has no text to ground its SID with")
        self._end = tokenizer.eos_token_id
        self._cache: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def _ids(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = encode_text(self._tokenizer, text)
        return self._cache[text]

    def example(self, number: int, family: str) -> Example:
        """The example of one item and family. Raises DataError when its text is missing."""
        item = self._items[number]
        if family not in self._families[number]:
            raise DataError(f"item {item.item_id!r} has no text for family {family!r}")
        sid = self._vocabulary.token_ids(item.sid)
        title, description = clean_text(item.title, MAX_TITLE_CHARS), description_of(item)
        what = next(part for part in family.split("_") if part not in ("to", "sid"))
        label, text = {
            "title": ("Title", title),
            "description": ("Description", description),
            "both": ("Title and description", f"{title}. {description}"),
        }[what]
        if family in TO_SID:
            prompt = [*self._ids(f"{label}: "), *self._ids(text), *self._ids("\nItem: ")]
            return Example(tuple(prompt), tuple(sid))
        prompt = [*self._ids("Item: "), *sid, *self._ids(f"\n{label}: ")]
        answer = self._ids(text) + ([] if self._end is None else [self._end])
        return Example(tuple(prompt), tuple(answer))

    def sample(self, rng: random.Random) -> list[Example]:
        """One example per item, its family drawn among all that the item has text for."""
        return [
            self.example(number, rng.choice(families))
            for number, families in enumerate(self._families)
        ]

    def epoch(self, rng: random.Random) -> list[Example]:
        """Two examples per item, one to and one from its SID, families drawn, order shuffled."""
        examples = []
        for number, families in enumerate(self._families):
            for direction in (TO_SID, FROM_SID):
                family = rng.choice([name for name in families if name in direction])
                examples.append(self.example(number, family))
        rng.shuffle(examples)
        return examples
