"""Probes: what held-out histories get recommended, before and after codes of the last level arrive.

The beams of the levels before the last hardly depend on a new code (only through the softmax's
normalization, in which its share is kept small and measured). So they are searched once; after
that, judging a batch of new items is a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from gti_core.bundle.delta import CatalogState
from gti_core.decoding.beam import BeamSearch
from gti_core.decoding.constraint import ConstraintIndex
from gti_core.decoding.tree import fits_tree, run_tree
from gti_core.errors import UnsupportedModelError
from gti_core.lm import SidLM
from gti_core.onboarding.contexts import log_norms, with_rows
from gti_core.types import FloatArray, IntArray, LongArray, Sid

_BATCH = 16


@dataclass(frozen=True, eq=False)
class ProbeBeams:
    """The best prefixes of L - 1 codes of each probe, and the states after them.

    Args:
        prefixes: shape [P, W, L - 1], int32.
        scores: cumulative log-probability of each, [P, W], float32; -inf where a probe has fewer.
        hidden: states in which the last code is scored, [P, W, D], float32.
        log_norms: log of the sum of exp(logit) over the base's active rows, [P, W], float32.
        targets: catalogue row of what came next, [P], int64.
        seen: catalogue rows of each history.
    """

    prefixes: IntArray
    scores: FloatArray
    hidden: FloatArray
    log_norms: FloatArray
    targets: LongArray
    seen: tuple[frozenset[int], ...]

    def __len__(self) -> int:
        return len(self.targets)

    def some(self, places: LongArray) -> ProbeBeams:
        """Those of some probes, by number."""
        return ProbeBeams(
            self.prefixes[places],
            self.scores[places],
            self.hidden[places],
            self.log_norms[places],
            self.targets[places],
            tuple(self.seen[place] for place in places.tolist()),
        )

    @classmethod
    def joined(cls, parts: Sequence[ProbeBeams]) -> ProbeBeams:
        """Those of all parts, of one width, one after another."""
        return cls(
            np.concatenate([part.prefixes for part in parts]),
            np.concatenate([part.scores for part in parts]),
            np.concatenate([part.hidden for part in parts]),
            np.concatenate([part.log_norms for part in parts]),
            np.concatenate([part.targets for part in parts]),
            tuple(seen for part in parts for seen in part.seen),
        )


def search_prefixes(
    lm: SidLM,
    index: ConstraintIndex,
    prompts: Sequence[Sequence[int]],
    seen: Sequence[frozenset[int]],
    targets: Sequence[int],
    *,
    beam_width: int,
    progress: Callable[[int, int], None] | None = None,
) -> ProbeBeams:
    """Run the searches of some prompts up to the last level.

    Args:
        lm: the model of the base version.
        index: its constraint index.
        prompts: P prompts of token ids.
        seen: catalogue rows that must not come back, per prompt.
        targets: catalogue row of what came next, per prompt.
        beam_width: W.
        progress: called with (prompts done, P).

    Raises:
        UnsupportedModelError: attention layers that see a few tokens only.
    """
    count, levels = len(prompts), lm.vocabulary.levels
    width = int(lm.embedding.shape[1])
    prefixes = np.zeros((count, beam_width, levels - 1), dtype=np.int32)
    scores = np.full((count, beam_width), -np.inf, dtype=np.float32)
    hidden = np.zeros((count, beam_width, width), dtype=np.float32)
    norms = np.zeros((count, beam_width), dtype=np.float32)
    order = sorted(range(count), key=lambda number: len(prompts[number]))
    for start in range(0, count, _BATCH):
        batch = order[start : start + _BATCH]
        searches = [
            BeamSearch(index, lm.vocabulary, index.admissible(seen[number]), beam_width)
            for number in batch
        ]
        chosen = [prompts[number] for number in batch]
        if not fits_tree(lm.backbone, chosen, searches):
            raise UnsupportedModelError("probes need attention that sees the whole prompt")

        def keep(
            place: int,
            states: Tensor,
            batch: list[int] = batch,
            searches: list[BeamSearch] = searches,
        ) -> None:
            search, number = searches[place], batch[place]
            if search.level != levels - 1:
                return
            beams = len(search.frontier)
            prefixes[number, :beams] = [beam.prefix for beam in search.frontier]
            scores[number, :beams] = [beam.logprob for beam in search.frontier]
            hidden[number, :beams] = states.float().numpy()
            norms[number, :beams] = log_norms(lm, states, lm.vocabulary.active_mask).numpy()

        run_tree(lm, chosen, searches, keep)
        if progress is not None:
            progress(min(start + _BATCH, count), count)
    return ProbeBeams(prefixes, scores, hidden, norms, np.array(targets, np.int64), tuple(seen))


def rank_probes(lm: SidLM, probes: ProbeBeams, state: CatalogState, k: int) -> LongArray:
    """What each probe gets under a version: catalogue rows, best first, [P, k], -1 padded.

    Args:
        lm: the model of the base version.
        probes: searched with it.
        state: the version; its items in service compete, those of the probe's history do not.
        k: items wanted.
    """
    count, width = probes.scores.shape
    flat = probes.hidden.reshape(count * width, probes.hidden.shape[2])
    vocabulary = state.vocabulary
    first, size = vocabulary.offsets[-1], vocabulary.sizes[-1]
    last_rows = lm.output_rows.detach()[first : first + size].float().numpy().copy()
    norms = probes.log_norms.reshape(-1)
    if state.rows is not None:
        norms = with_rows(flat, norms, state.rows.output)
        inside = state.rows.numbers >= first
        last_rows[state.rows.numbers[inside] - first] = state.rows.output[inside]
    logits = flat @ last_rows.T
    below = _children(state)
    ranking = np.full((count, k), -1, dtype=np.int64)
    for probe in range(count):
        rows, scores = [], []
        for beam in range(width):
            if not np.isfinite(probes.scores[probe, beam]):
                break
            found = below.get(tuple(int(code) for code in probes.prefixes[probe, beam]))
            if found is None:
                continue
            place = probe * width + beam
            rows.append(found[0])
            scores.append(logits[place, found[1]] - norms[place] + probes.scores[probe, beam])
        if not rows:
            continue
        candidates, values = np.concatenate(rows), np.concatenate(scores)
        if probes.seen[probe]:
            values = np.where(np.isin(candidates, list(probes.seen[probe])), -np.inf, values)
        best = np.lexsort((candidates, -values))[:k]
        best = best[np.isfinite(values[best])]
        ranking[probe, : len(best)] = candidates[best]
    return ranking


def _children(state: CatalogState) -> dict[Sid, tuple[IntArray, IntArray]]:
    """Items in service by their first L - 1 codes: catalogue rows and last codes."""
    index = state.index
    bits = np.diff(index.base.cumulative).astype(np.bool_)
    sids, rows = index.sids[bits], index.rows[bits]
    if not len(rows):
        return {}
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (sids[1:, :-1] != sids[:-1, :-1]).any(axis=1)
    edges = [*np.flatnonzero(new).tolist(), len(rows)]
    return {
        tuple(int(code) for code in sids[lo, :-1]): (rows[lo:hi], sids[lo:hi, -1])
        for lo, hi in pairwise(edges)
    }
