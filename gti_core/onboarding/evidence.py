"""Evidence for new codes: where each is wanted, and where it is not.

Wanted: (a) after the item's own text, (b) after histories of the known items it resembles, drawn
from the log and made up. Not wanted: (c) where known items of the same prefix were chosen, anywhere
else at the last level, and at the other levels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from gti_core.lm import SidLM
from gti_core.onboarding.assign import Neighbours
from gti_core.onboarding.contexts import Contexts, last_states, log_norms, with_rows
from gti_core.onboarding.fit import Evidence
from gti_core.onboarding.own import EvidenceOptions, OwnPrompts
from gti_core.types import FloatArray, IntArray, LongArray, Sid

_Part = tuple[FloatArray, FloatArray, FloatArray]
"""States [n, D], their log norms [n], and what is wanted in them [n, M]."""


class EvidenceMaker:
    """Puts evidence together for groups of new items with one prefix.

    Args:
        lm: the model, rows activated since the base written.
        contexts: of training histories.
        sids: SIDs by catalogue row of the version, [N, L].
        activated: output rows activated since the base, [A, D], float32.
        options: options.
        seed: of what is drawn.
    """

    def __init__(
        self,
        lm: SidLM,
        contexts: Contexts,
        sids: IntArray,
        activated: FloatArray,
        options: EvidenceOptions,
        seed: int = 0,
    ) -> None:
        self._lm = lm
        self._contexts = contexts
        self._sids = sids
        self._activated = activated
        self._options = options
        self._rng = random.Random(seed)
        self._norms = with_rows(contexts.hidden, contexts.log_norm, activated)
        self._inner = self._sample(len(contexts.inner), options.elsewhere)
        self._inner_norms = with_rows(
            contexts.inner[self._inner], contexts.inner_log_norm[self._inner], activated
        )
        prefixes = sids[contexts.targets, :-1] if len(contexts) else sids[:0, :-1]
        self._by_prefix: dict[Sid, list[int]] = {}
        for event, prefix in enumerate(map(tuple, prefixes.tolist())):
            self._by_prefix.setdefault(prefix, []).append(event)

    def for_group(
        self,
        prefix: Sid,
        prompts: Sequence[OwnPrompts],
        near: Neighbours,
    ) -> Evidence:
        """Evidence for M items that share a prefix.

        Args:
            prefix: their first L - 1 codes.
            prompts: of each item.
            near: their neighbours.
        """
        parts = [
            self._asked(prefix, prompts),
            self._logged(prefix, near),
            self._elsewhere(prefix, len(prompts)),
        ]
        hidden, norms, wanted = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Evidence(hidden, norms, wanted, np.ones(len(hidden), dtype=np.float32))

    def _asked(self, prefix: Sid, items: Sequence[OwnPrompts]) -> _Part:
        """(a) and the made-up half of (b)."""
        options = self._options
        prompts: list[Sequence[int]] = []
        wanted: list[tuple[int, float]] = []
        for number, own in enumerate(items):
            prompts.extend([*own.texts, *own.histories])
            wanted.extend([(number, options.wanted_text)] * len(own.texts))
            wanted.extend([(number, options.wanted_made_up)] * len(own.histories))
        codes = self._lm.vocabulary.token_ids(prefix)
        states = last_states(self._lm, [[*prompt, *codes] for prompt in prompts])
        norms = log_norms(self._lm, states, self._lm.vocabulary.active_mask).numpy()
        targets = np.zeros((len(prompts), len(items)), dtype=np.float32)
        for place, (number, value) in enumerate(wanted):
            targets[place, number] = value
        hidden = states.numpy()
        return hidden, with_rows(hidden, norms, self._activated), targets

    def _logged(self, prefix: Sid, near: Neighbours) -> _Part:
        """The half of (b) from the log, and of (c) what has the same prefix."""
        found = self._by_prefix.get(prefix, [])
        most = min(len(found), self._options.same_prefix)
        events = np.array(self._rng.sample(found, most), dtype=np.int64)
        return self._contexts.hidden[events], self._norms[events], self._shares(events, near)

    def _elsewhere(self, prefix: Sid, items: int) -> _Part:
        """The rest of (c): other prefixes, and other levels."""
        contexts = self._contexts
        others = self._sample(len(contexts), self._options.elsewhere)
        prefixes = self._sids[contexts.targets[others], :-1]
        others = others[(prefixes != np.array(prefix)).any(axis=1)]
        hidden = np.concatenate([contexts.hidden[others], contexts.inner[self._inner]])
        norms = np.concatenate([self._norms[others], self._inner_norms])
        return hidden, norms, np.zeros((len(hidden), items), dtype=np.float32)

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

    def _sample(self, count: int, most: int) -> LongArray:
        return np.array(self._rng.sample(range(count), min(count, most)), dtype=np.int64)
