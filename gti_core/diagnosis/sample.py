"""Which tokens and words the plots show: the same for all arms with the same data and backbone."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gti_core.lm import encode_text
from gti_core.text import clean_text
from gti_core.types import LongArray
from gti_core.vocabulary import SidVocabulary

TOKENS = 50
"""Text tokens and SID tokens in a cosine matrix, each (paper)."""
WORDS = 60
"""Words on a map."""

MAX_TITLES = 20_000
MAX_TITLE_CHARS = 200
_WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class Sample:
    """What is shown of a vocabulary.

    Args:
        text_ids: token ids of the text side of the cosine matrix, ascending.
        text_tokens: their spelling, for people.
        codes: (level, code) of its SID side, level after level, codes ascending.
        words: words of the map, most frequent first.
        word_ids: their token ids.
    """

    text_ids: tuple[int, ...]
    text_tokens: tuple[str, ...]
    codes: tuple[tuple[int, int], ...]
    words: tuple[str, ...]
    word_ids: tuple[int, ...]


def choose(tokenizer: Any, titles: Sequence[str], vocabulary: SidVocabulary, seed: int) -> Sample:
    """Choose tokens and words. The same arguments give the same choice.

    Text tokens are drawn among the tokens of the titles, special tokens left out; SID tokens
    evenly from the levels' active codes. Of more than `MAX_TITLES` titles a draw is read.

    Args:
        tokenizer: the backbone's.
        titles: item titles in catalogue order.
        vocabulary: active codes; text tokens are those below its ``first_token_id``.
        seed: seed of the draws.
    """
    draw = random.Random(seed)
    if len(titles) > MAX_TITLES:
        titles = draw.sample(titles, MAX_TITLES)
    cleaned = [clean_text(title, MAX_TITLE_CHARS) for title in titles]
    special = set(tokenizer.all_special_ids)

    def is_text(token: int) -> bool:
        return token < vocabulary.first_token_id and token not in special

    found = {token for title in cleaned for token in encode_text(tokenizer, title)}
    tokens = sorted(filter(is_text, found))
    text_ids = sorted(draw.sample(tokens, min(TOKENS, len(tokens))))
    words = {}
    for word in frequent_words(cleaned):
        token = single_token(tokenizer, word)
        if token is not None and is_text(token) and token not in words:
            words[token] = word
        if len(words) == WORDS:
            break
    return Sample(
        tuple(text_ids),
        tuple(tokenizer.decode([token]) for token in text_ids),
        choose_codes(vocabulary.active, TOKENS, draw),
        tuple(words.values()),
        tuple(words),
    )


def choose_codes(
    active: Sequence[int], count: int, draw: random.Random
) -> tuple[tuple[int, int], ...]:
    """Up to ``count`` (level, code) pairs, as evenly from the levels as their codes allow."""
    shares = [0] * len(active)
    for _ in range(min(count, sum(active))):
        open_levels = [level for level, size in enumerate(active) if shares[level] < size]
        shares[min(open_levels, key=lambda level: shares[level])] += 1
    return tuple(
        (level, code)
        for level, share in enumerate(shares)
        for code in sorted(draw.sample(range(active[level]), share))
    )


def frequent_words(titles: Sequence[str]) -> list[str]:
    """Words of three letters or more, most frequent first, English function words left out.

    Upper and lower case count as one word, which is spelt as it is most often.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    spellings: dict[str, Counter[str]] = defaultdict(Counter)
    for title in titles:
        for word in _WORD.findall(title):
            spellings[word.casefold()][word] += 1
    counted = [
        (-forms.total(), min(forms, key=lambda form: (-forms[form], form)))
        for key, forms in spellings.items()
        if key not in ENGLISH_STOP_WORDS
    ]
    return [word for _, word in sorted(counted)]


def single_token(tokenizer: Any, word: str) -> int | None:
    """The token of a word inside a sentence, or at its start; None where it takes several."""
    for text in (f" {word}", word):
        ids = encode_text(tokenizer, text)
        if len(ids) == 1:
            return ids[0]
    return None


def spread(count: int, limit: int) -> LongArray:
    """Indices of at most ``limit`` of ``count`` things, evenly spaced, ascending, int64."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))
