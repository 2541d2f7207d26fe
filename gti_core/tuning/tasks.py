"""Tasks of supervised fine-tuning, and their mixture.

"next" is the next item of a history (vanilla SFT). "align" mixes in the six families of the
grounding corpus (multi-task SFT, the LC-Rec arm of the paper; Zheng et al., "Adapting Large
Language Models by Integrating Collaborative Semantics for Recommendation", ICDE 2024). "search"
leads from a natural-language query to the SID.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from gti_core.catalog import Item
from gti_core.grounding.corpus import Example, description_of, text_of
from gti_core.lm import encode_text
from gti_core.prompts import SearchPrompt
from gti_core.text import clean_text
from gti_core.vocabulary import SidVocabulary

SEARCH_BEFORE = "A user looks for: "
SEARCH_AFTER = "\nItem: "
_QUERY_WORDS = (2, 8)

Epoch = Callable[[random.Random], Sequence[Example]]


def search_prompt(tokenizer: Any) -> SearchPrompt:
    """The search template in a backbone's tokens."""
    return SearchPrompt(
        SEARCH_BEFORE,
        SEARCH_AFTER,
        tuple(encode_text(tokenizer, SEARCH_BEFORE)),
        tuple(encode_text(tokenizer, SEARCH_AFTER)),
    )


def draw_query(item: Item, rng: random.Random) -> str:
    """A query that the item answers: words of its title, its description, or both.

    People type a few words, so a run of 2 to 8 words is drawn; every third query is a whole text.
    """
    title = clean_text(item.title, 200)
    texts = [text for text in (title, description_of(item)) if text]
    whole = rng.choice(texts) if texts else text_of(item)
    words = whole.split()
    if rng.random() < 1 / 3 or len(words) <= _QUERY_WORDS[0]:
        return whole
    count = rng.randint(_QUERY_WORDS[0], min(_QUERY_WORDS[1], len(words)))
    start = rng.randint(0, len(words) - count)
    return " ".join(words[start : start + count])


class SearchExamples:
    """One query per item and epoch.

    Args:
        items: items with SIDs and texts.
        vocabulary: SID vocabulary.
        tokenizer: the backbone's.
        prompt: the template.
    """

    def __init__(
        self,
        items: Sequence[Item],
        vocabulary: SidVocabulary,
        tokenizer: Any,
        prompt: SearchPrompt,
    ) -> None:
        self._items = items
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._prompt = prompt

    def epoch(self, rng: random.Random) -> list[Example]:
        """One example per item, in the items' order."""
        examples = []
        for item in self._items:
            query = encode_text(self._tokenizer, draw_query(item, rng))
            prompt = self._prompt.token_ids(query)
            examples.append(Example(tuple(prompt), tuple(self._vocabulary.token_ids(item.sid))))
        return examples


def mixture(epochs: Sequence[Epoch]) -> Epoch:
    """One epoch of every task, shuffled together."""

    def epoch(rng: random.Random) -> Sequence[Example]:
        examples = [example for task in epochs for example in task(rng)]
        if len(epochs) > 1:
            rng.shuffle(examples)
        return examples

    return epoch
