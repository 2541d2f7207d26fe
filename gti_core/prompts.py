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
