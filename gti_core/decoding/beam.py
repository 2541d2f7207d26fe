"""Constrained beam search over semantic IDs: one readable implementation for every engine.

An engine owns the model; `BeamSearch` owns the search. Per level the engine scores each prefix
of `frontier` and hands the log-probabilities to `advance`.

Score (the project's one definition): an item's score is the sum over levels of the log-softmax
of its code's token among all active SID rows. The constraint masks after normalizing. With
``beam_width`` >= N the result equals scoring every item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gti_core.decoding.constraint import Admissible, ConstraintIndex
from gti_core.decoding.filters import Filter
from gti_core.errors import DecodingError
from gti_core.types import FloatArray, Sid
from gti_core.vocabulary import SidVocabulary

ScoreFunction = Callable[[Sequence[Sid]], FloatArray]
"""Prefixes of one length -> log-probabilities [len(prefixes), S] of the next SID token."""


@dataclass(frozen=True)
class Beam:
    """A prefix of a semantic ID.

    Args:
        prefix: codes so far.
        logprob: cumulative log-probability, nats.
        lo: start of the prefix's range in the constraint index.
        hi: end of it.
    """

    prefix: Sid
    logprob: float
    lo: int
    hi: int


@dataclass(frozen=True)
class ScoredRow:
    """An item found.

    Args:
        row: catalogue row.
        sid: its semantic ID.
        logprob: cumulative log-probability, nats.
    """

    row: int
    sid: Sid
    logprob: float


class BeamSearch:
    """State of one constrained beam search.

    Args:
        index: constraint index of the version served.
        vocabulary: maps codes to the columns of the log-probabilities.
        admissible: items that may come back.
        beam_width: W, prefixes kept per level.

    Raises:
        DecodingError: ``beam_width`` < 1.
    """

    def __init__(
        self,
        index: ConstraintIndex,
        vocabulary: SidVocabulary,
        admissible: Admissible | Filter,
        beam_width: int,
    ) -> None:
        if beam_width < 1:
            raise DecodingError(f"beam_width must be at least 1, got {beam_width}")
        self._index = index
        self._vocabulary = vocabulary
        self._admissible = admissible
        self.beam_width = beam_width
        self.level = 0
        self.parents: list[int] = []
        """For each prefix of the frontier, its place in the frontier of the level before."""
        self.frontier: list[Beam] = [Beam((), 0.0, 0, len(index))] if admissible.total else []

    @property
    def levels(self) -> int:
        """L, codes per SID."""
        return self._index.levels

    @property
    def columns(self) -> int:
        """Columns of a cache that its prefixes take, at most, beyond those of the prompt."""
        return (self.levels - 1) * self.beam_width

    @property
    def done(self) -> bool:
        """True when every prefix is a whole SID, or nothing is admissible."""
        return not self.frontier or self.level == self._index.levels

    def allowed_codes(self, beam: Beam) -> list[int]:
        """Codes that may follow a prefix of the frontier, ascending."""
        children = self._index.children(beam.lo, beam.hi, self.level, self._admissible)
        return [int(code) for code in children.codes]

    def advance(self, logprobs: FloatArray) -> None:
        """Extend every prefix by one code and keep the best W.

        Args:
            logprobs: shape [len(frontier), S], float; row i holds the log-softmax over the active
                SID rows after prefix i. Only the columns of allowed codes are read. Ties are
                broken by the order of the SIDs.

        Raises:
            DecodingError: wrong shape, or NaN in a column that is read.
        """
        if logprobs.shape != (len(self.frontier), self._vocabulary.rows):
            raise DecodingError(
                f"expected log-probabilities of shape "
                f"{(len(self.frontier), self._vocabulary.rows)}, got {logprobs.shape}"
            )
        offset = self._vocabulary.offsets[self.level]
        beam_of, codes, los, his, scores = [], [], [], [], []
        for number, beam in enumerate(self.frontier):
            children = self._index.children(beam.lo, beam.hi, self.level, self._admissible)
            beam_of.append(np.full(len(children.codes), number))
            codes.append(children.codes)
            los.append(children.lo)
            his.append(children.hi)
            scores.append(beam.logprob + logprobs[number, offset + children.codes].astype(float))
        score = np.concatenate(scores)
        if np.isnan(score).any():
            raise DecodingError(f"NaN log-probability at level {self.level}")
        lo = np.concatenate(los)
        best = np.lexsort((lo, -score))[: self.beam_width]
        parent, code, hi = np.concatenate(beam_of), np.concatenate(codes), np.concatenate(his)
        self.frontier = [
            Beam(
                (*self.frontier[parent[i]].prefix, int(code[i])),
                float(score[i]),
                int(lo[i]),
                int(hi[i]),
            )
            for i in best
        ]
        self.parents = [int(parent[i]) for i in best]
        self.level += 1

    def results(self, k: int) -> list[ScoredRow]:
        """The best ``k`` items, best first. Fewer only when fewer are admissible or W < k."""
        if not self.done:
            raise DecodingError(f"the search stands at level {self.level}")
        return [
            ScoredRow(int(self._index.rows[beam.lo]), beam.prefix, beam.logprob)
            for beam in self.frontier[:k]
        ]


def beam_search(
    score: ScoreFunction,
    index: ConstraintIndex,
    vocabulary: SidVocabulary,
    admissible: Admissible | Filter,
    beam_width: int,
    k: int,
) -> list[ScoredRow]:
    """Run a whole search with a scoring function. See `BeamSearch`."""
    search = BeamSearch(index, vocabulary, admissible, beam_width)
    while not search.done:
        search.advance(score([beam.prefix for beam in search.frontier]))
    return search.results(k)


def exhaustive_search(
    score: ScoreFunction,
    sids: Sequence[Sid],
    vocabulary: SidVocabulary,
    k: int,
    excluded: frozenset[Sid] = frozenset(),
) -> list[tuple[Sid, float]]:
    """Oracle: score every item, sort, cut. Ties are broken by the order of the SIDs.

    Returns:
        (SID, cumulative log-probability), best first.
    """
    scored = []
    for sid in sids:
        if sid in excluded:
            continue
        total = 0.0
        for level, code in enumerate(sid):
            total += float(score([sid[:level]])[0, vocabulary.row(level, code)])
        scored.append((sid, total))
    return sorted(scored, key=lambda pair: (-pair[1], pair[0]))[:k]
