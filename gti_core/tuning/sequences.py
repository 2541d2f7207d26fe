"""Training sequences for the append-only prompt: every item of a window is a target."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from gti_core.catalog import ItemCatalog
from gti_core.grounding.corpus import Example
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import ItemId
from gti_core.vocabulary import SidVocabulary


class SequenceExamples:
    """Windows over users' training histories.

    Each history is cut into windows of ``prompt.max_history`` items, the first one shortened by
    an offset drawn per epoch, so that over epochs an item is seen with contexts of every length.
    A window reads: instruction, then item after item; the loss covers every item but the first
    (which follows nothing but the instruction), as the prompt at serving time reads.

    Args:
        histories: user -> item ids, oldest first.
        catalog: items with SIDs.
        vocabulary: SID vocabulary.
        prompt: the template.
        phrasings: further instructions as token ids; each window draws one of them or the
            template's own. Serving uses the template's.
    """

    def __init__(
        self,
        histories: Mapping[str, Sequence[ItemId]],
        catalog: ItemCatalog,
        vocabulary: SidVocabulary,
        prompt: AppendOnlyPrompt,
        phrasings: Sequence[Sequence[int]] = (),
    ) -> None:
        self._prompt = prompt
        self._instructions = [prompt.instruction_token_ids, *map(tuple, phrasings)]
        tokens = {item.item_id: tuple(vocabulary.token_ids(item.sid)) for item in catalog}
        self._users = [
            [tokens[item_id] for item_id in histories[user]]
            for user in sorted(histories)
            if len(histories[user]) >= 2
        ]
        size = prompt.max_history
        self._windows = sum(-(-len(user) // size) for user in self._users)

    def __len__(self) -> int:
        return self._windows

    def epoch(self, rng: random.Random) -> list[Example]:
        """One epoch: `len(self)` windows, shuffled. Windows overlap a little at their seams."""
        size = self._prompt.max_history
        examples = []
        for user in self._users:
            windows = -(-len(user) // size)
            if windows == 1:
                examples.append(self._example(user, rng))
                continue
            # Spread the windows evenly over the history, then shift all of them together.
            slack = len(user) - size
            shift = rng.random()
            for number in range(windows):
                start = round(min(slack, max(0.0, (number + shift - 0.5) * slack / (windows - 1))))
                examples.append(self._example(user[start : start + size], rng))
        rng.shuffle(examples)
        return examples

    def _example(self, window: Sequence[tuple[int, ...]], rng: random.Random) -> Example:
        # No draw where there is no choice, so that runs without phrasings stay as they were.
        several = len(self._instructions) > 1
        instruction = rng.choice(self._instructions) if several else self._instructions[0]
        prompt = (*instruction, *window[0])
        answer = tuple(token for item in window[1:] for token in item)
        return Example(prompt, answer)
