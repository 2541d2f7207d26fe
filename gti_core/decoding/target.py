"""A beam search that is asked for one item's rank only, and computes no more than that takes.

Evaluation wants to know where the target stands in the list, not the list. A prefix that scores
below the whole target can't lead to an item above it, since log-probabilities only add up; and once
the target's own prefix is out of the W best, the answer is known. So the target's path is scored
first, one token per level, and the search then carries on with the prefixes that still matter.
"""

from __future__ import annotations

from gti_core.decoding.beam import Beam, BeamSearch
from gti_core.decoding.constraint import Admissible, ConstraintIndex
from gti_core.decoding.filters import Filter
from gti_core.types import FloatArray, Sid
from gti_core.vocabulary import SidVocabulary

MARGIN = 0.5
"""Nats below the target's score at which a prefix is dropped: far more than the rounding of
bfloat16 between two passes over the same prefix."""


class TargetSearch(BeamSearch):
    """The rank of one item in the list that `BeamSearch` of the same width would return.

    Driven as a `BeamSearch`; its frontier walks down the target's path first and then starts again
    at the first level, which is why it takes L - 1 steps more.

    Args:
        index: constraint index.
        vocabulary: maps codes to the columns of the log-probabilities.
        admissible: items that may come back.
        beam_width: W.
        target: SID of an item of the index.
    """

    def __init__(
        self,
        index: ConstraintIndex,
        vocabulary: SidVocabulary,
        admissible: Admissible | Filter,
        beam_width: int,
        target: Sid,
    ) -> None:
        super().__init__(index, vocabulary, admissible, beam_width)
        self._target = target
        self._root = self.frontier
        self._first: FloatArray | None = None
        self._threshold: float | None = None
        if self.frontier and not self._reachable():
            self.frontier = []

    @property
    def columns(self) -> int:
        """As in `BeamSearch`, with the path that is walked first."""
        return super().columns + self.levels - 1

    @property
    def rank(self) -> int:
        """1 for the best item, 0 if the list does not hold the target; once the search is done."""
        for place, beam in enumerate(self.frontier):
            if beam.prefix == self._target:
                return place + 1
        return 0

    def advance(self, logprobs: FloatArray) -> None:
        """One step, along the path or of the search; see `BeamSearch.advance`."""
        if self._threshold is None:
            self._follow(logprobs)
        else:
            super().advance(logprobs)
            self._prune()

    def _follow(self, logprobs: FloatArray) -> None:
        """Go on to the target's next code; at its end, begin the search."""
        beam = self.frontier[0]
        if self._first is None:
            self._first = logprobs.copy()
        column = self._vocabulary.row(self.level, self._target[self.level])
        score = beam.logprob + float(logprobs[0, column])
        self.level += 1
        self.parents = [0]
        self.frontier = [Beam(self._target[: self.level], score, beam.lo, beam.hi)]
        if self.level < self.levels:
            return
        self._threshold = score - MARGIN
        self.level, self.frontier = 0, self._root
        super().advance(self._first)
        self._prune()

    def _prune(self) -> None:
        """Keep what can still stand above the target; nothing once the target is out."""
        assert self._threshold is not None
        kept = [place for place, beam in enumerate(self.frontier) if self._matters(beam)]
        if not any(self._on_path(self.frontier[place]) for place in kept):
            kept = []
        self.parents = [self.parents[place] for place in kept]
        self.frontier = [self.frontier[place] for place in kept]

    def _matters(self, beam: Beam) -> bool:
        assert self._threshold is not None
        return beam.logprob >= self._threshold or self._on_path(beam)

    def _on_path(self, beam: Beam) -> bool:
        return beam.prefix == self._target[: len(beam.prefix)]

    def _reachable(self) -> bool:
        """Whether the target is admissible."""
        lo, hi = self._root[0].lo, self._root[0].hi
        for level, code in enumerate(self._target):
            children = self._index.children(lo, hi, level, self._admissible)
            found = (children.codes == code).nonzero()[0]
            if not len(found):
                return False
            lo, hi = int(children.lo[found[0]]), int(children.hi[found[0]])
        return True
