"""Evidence for new codes: where each is wanted, and where it is not.

Wanted: (a) after the item's own text, (b) after histories of the known items it resembles, drawn
from the log and made up. Not wanted: (c) where known items of the same prefix were chosen, anywhere
else at the last level, and at the other levels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gti_core.lm import SidLM
from gti_core.onboarding.assign import Neighbours
from gti_core.onboarding.contexts import Contexts, last_states, log_norms
from gti_core.onboarding.fit import Evidence
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import FloatArray, IntArray, LongArray, Sid


@dataclass(frozen=True)
class EvidenceOptions:
    """How evidence is put together.

    Args:
        histories: made-up histories per item.
        history_length: items of each.
        neighbours: known items that they are drawn from.
        wanted_text: probability wanted after the item's own text.
        wanted_made_up: after a made-up history.
        wanted_logged: share of a neighbour's own probability wanted where the neighbour was chosen.
        same_prefix: most states of other items with the same prefix.
        elsewhere: most states of other prefixes, and of other levels.
    """

    histories: int = 12
    history_length: int = 4
    neighbours: int = 12
    wanted_text: float = 0.8
    wanted_made_up: float = 0.5
    wanted_logged: float = 0.5
    same_prefix: int = 256
    elsewhere: int = 512


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


class EvidenceMaker:
    """Puts evidence together for groups of new items with one prefix.

    Args:
        lm: the model, rows activated since the base written.
        prompt: template of histories.
        contexts: of training histories.
        sids: SIDs by catalogue row of the version, [N, L].
        activated: output rows activated since the base, [A, D], float32.
        options: options.
        seed: of what is drawn.
    """

    def __init__(
        self,
        lm: SidLM,
        prompt: AppendOnlyPrompt,
        contexts: Contexts,
        sids: IntArray,
        activated: FloatArray,
        options: EvidenceOptions,
        seed: int = 0,
    ) -> None:
        self._lm = lm
        self._prompt = prompt
        self._contexts = contexts
        self._sids = sids
        self._activated = activated
        self._options = options
        self._rng = random.Random(seed)
        self._norms = self._renewed(contexts.hidden, contexts.log_norm)
        self._inner = self._sample(len(contexts.inner), options.elsewhere)
        self._inner_norms = self._renewed(
            contexts.inner[self._inner], contexts.inner_log_norm[self._inner]
        )
        prefixes = sids[contexts.targets, :-1] if len(contexts) else sids[:0, :-1]
        self._by_prefix: dict[Sid, list[int]] = {}
        for event, prefix in enumerate(map(tuple, prefixes.tolist())):
            self._by_prefix.setdefault(prefix, []).append(event)

    def for_group(
        self,
        prefix: Sid,
        texts: Sequence[Sequence[Sequence[int]]],
        near: Neighbours,
        weights: FloatArray,
    ) -> Evidence:
        """Evidence for M items that share a prefix.

        Args:
            prefix: their first L - 1 codes.
            texts: per item, prompts of its own text, as token ids.
            near: their neighbours.
            weights: chance of each neighbour to stand in a made-up history, [M, R].
        """
        options, count = self._options, len(texts)
        codes = self._lm.vocabulary.token_ids(prefix)
        sequences: list[list[int]] = []
        wanted: list[tuple[int, float]] = []
        for number, prompts in enumerate(texts):
            sequences.extend([*prompt, *codes] for prompt in prompts)
            wanted.extend((number, options.wanted_text) for _ in prompts)
            histories = made_up_histories(
                near.rows[number, : options.neighbours],
                weights[number, : options.neighbours],
                options.histories,
                options.history_length,
                self._rng,
            )
            prompts = history_prompts(histories, self._sids, self._prompt, self._lm)
            sequences.extend([*prompt, *codes] for prompt in prompts)
            wanted.extend((number, options.wanted_made_up) for _ in prompts)
        states = last_states(self._lm, sequences)
        norms = log_norms(self._lm, states, self._lm.vocabulary.active_mask).numpy()
        hidden = [states.numpy()]
        log_norm = [self._renewed(states.numpy(), norms)]
        targets = np.zeros((len(sequences), count), dtype=np.float32)
        targets[np.arange(len(wanted)), [number for number, _ in wanted]] = [
            value for _, value in wanted
        ]
        wants = [targets]

        logged = self._by_prefix.get(prefix, [])
        events = np.array(self._rng.sample(logged, min(len(logged), options.same_prefix)), np.int64)
        hidden.append(self._contexts.hidden[events])
        log_norm.append(self._norms[events])
        wants.append(self._shares(events, near))

        others = self._sample(len(self._contexts), options.elsewhere)
        prefixes = self._sids[self._contexts.targets[others], :-1]
        others = others[(prefixes != np.array(prefix)).any(axis=1)]
        hidden.append(self._contexts.hidden[others])
        log_norm.append(self._norms[others])
        hidden.append(self._contexts.inner[self._inner])
        log_norm.append(self._inner_norms)
        wants.append(np.zeros((len(others) + len(self._inner), count), dtype=np.float32))
        total = np.concatenate(hidden)
        return Evidence(
            total,
            np.concatenate(log_norm),
            np.concatenate(wants),
            np.ones(len(total), dtype=np.float32),
        )

    def _shares(self, events: LongArray, near: Neighbours) -> FloatArray:
        """Wanted where an item of the same prefix was chosen: a share for those that resemble it,
        of the probability that the model gives it."""
        count = len(near.rows)
        wants: FloatArray = np.zeros((len(events), count), dtype=np.float32)
        if not len(events):
            return wants
        targets = self._contexts.targets[events]
        vocabulary = self._lm.vocabulary
        last = vocabulary.levels - 1
        rows = self._lm.output_rows.detach()
        numbers = vocabulary.offsets[last] + self._sids[targets, last]
        logits = (self._contexts.hidden[events] * rows[numbers].float().numpy()).sum(axis=1)
        chance = np.exp(np.minimum(0.0, logits - self._norms[events]))
        for number in range(count):
            place = {int(row): rank for rank, row in enumerate(near.rows[number])}
            ranks = np.array([place.get(int(target), -1) for target in targets])
            alike = np.where(ranks >= 0, near.similarity[number, ranks], 0.0)
            wants[:, number] = self._options.wanted_logged * chance * np.clip(alike, 0.0, 1.0)
        # Items of one batch that resemble one neighbour share its probability.
        crowd = wants.sum(axis=1, keepdims=True)
        shrunk: FloatArray = wants * np.minimum(1.0, 0.9 / np.maximum(crowd, 1e-9))
        return shrunk.astype(np.float32)

    def _renewed(self, hidden: FloatArray, norms: FloatArray) -> FloatArray:
        """Norms with the rows activated since the base."""
        if not len(self._activated) or not len(hidden):
            return norms
        added = np.logaddexp.reduce(hidden @ self._activated.T, axis=1)
        renewed: FloatArray = np.logaddexp(norms, added).astype(np.float32)
        return renewed

    def _sample(self, count: int, most: int) -> LongArray:
        return np.array(self._rng.sample(range(count), min(count, most)), dtype=np.int64)
