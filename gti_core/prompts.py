"""Prompt templates for recommendation: from a history of SIDs to token ids.

Append-only: fixed instruction, then the history's SIDs oldest first; the next item's SID is the
continuation. A user's earlier prompt is therefore a prefix of the next one, and a prefix cache
serves it. Histories longer than ``max_history`` lose their oldest items in steps of ``drop``, so
that most requests of a long-lived user still share their prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gti_core.errors import BundleError
from gti_core.types import JsonDict, Sid
from gti_core.vocabulary import SidVocabulary

APPEND_ONLY = "append-only/1"


@dataclass(frozen=True)
class AppendOnlyPrompt:
    """The default template.

    Args:
        instruction: text of the fixed instruction.
        instruction_token_ids: the same as token ids of the backbone's tokenizer; kept so that
            serving needs no tokenizer.
        max_history: most items that enter the prompt.
        drop: items dropped at a time from a longer history, 1 <= drop <= max_history.
    """

    instruction: str
    instruction_token_ids: tuple[int, ...]
    max_history: int = 50
    drop: int = 10

    def window(self, history: Sequence[Sid]) -> Sequence[Sid]:
        """The most recent part of a history that enters the prompt, oldest first."""
        surplus = len(history) - self.max_history
        if surplus <= 0:
            return history
        steps = -(-surplus // self.drop)
        return history[steps * self.drop :]

    def token_ids(self, history: Sequence[Sid], vocabulary: SidVocabulary) -> list[int]:
        """Token ids of the prompt for a history of SIDs, oldest first."""
        ids = list(self.instruction_token_ids)
        for sid in self.window(history):
            ids.extend(vocabulary.token_ids(sid))
        return ids

    def max_tokens(self, levels: int) -> int:
        """Longest sequence: instruction, full history and the next item."""
        return len(self.instruction_token_ids) + (self.max_history + 1) * levels

    def to_json(self) -> JsonDict:
        """JSON form for a bundle's manifest."""
        return {
            "template": APPEND_ONLY,
            "instruction": self.instruction,
            "instruction_token_ids": list(self.instruction_token_ids),
            "max_history": self.max_history,
            "drop": self.drop,
        }

    @classmethod
    def from_json(cls, data: JsonDict) -> AppendOnlyPrompt:
        """Inverse of `to_json`. Raises BundleError for another template or missing fields."""
        if data.get("template") != APPEND_ONLY:
            raise BundleError(f"unknown prompt template {data.get('template')!r}")
        try:
            return cls(
                str(data["instruction"]),
                tuple(int(x) for x in data["instruction_token_ids"]),
                int(data["max_history"]),
                int(data["drop"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"prompt template is incomplete: {error!r}") from error


SEARCH = "search/1"
MAX_QUERY_CHARS = 500


@dataclass(frozen=True)
class SearchPrompt:
    """The template for a natural-language query: before, query, after; the SID continues it.

    The query is tokenized on its own, between the fixed parts, so that no spelling in it can merge
    with them (`gti_core.lm.encode_text` keeps special tokens out of it).

    Args:
        before: text before the query.
        after: text after it.
        before_token_ids: ``before`` as token ids of the backbone's tokenizer.
        after_token_ids: ``after`` as token ids.
        max_query_tokens: a longer query is cut to its first so many tokens.
    """

    before: str
    after: str
    before_token_ids: tuple[int, ...]
    after_token_ids: tuple[int, ...]
    max_query_tokens: int = 64

    def token_ids(self, query_token_ids: Sequence[int]) -> list[int]:
        """Token ids of the prompt for a tokenized query."""
        query = query_token_ids[: self.max_query_tokens]
        return [*self.before_token_ids, *query, *self.after_token_ids]

    def to_json(self) -> JsonDict:
        """JSON form for a bundle's manifest."""
        return {
            "template": SEARCH,
            "before": self.before,
            "after": self.after,
            "before_token_ids": list(self.before_token_ids),
            "after_token_ids": list(self.after_token_ids),
            "max_query_tokens": self.max_query_tokens,
        }

    @classmethod
    def from_json(cls, data: JsonDict) -> SearchPrompt:
        """Inverse of `to_json`. Raises BundleError for another template or missing fields."""
        if data.get("template") != SEARCH:
            raise BundleError(f"unknown search template {data.get('template')!r}")
        try:
            return cls(
                str(data["before"]),
                str(data["after"]),
                tuple(int(x) for x in data["before_token_ids"]),
                tuple(int(x) for x in data["after_token_ids"]),
                int(data["max_query_tokens"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"search template is incomplete: {error!r}") from error
