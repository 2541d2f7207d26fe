"""Which prefix a new item shares: one that the model writes where the item is wanted.

An item is reached through its first L - 1 codes. Those of the items most like it are candidates,
and for a model that knows texts those that it writes after the item's own text. Among them the
model's own beams decide, after made-up histories of similar items and after the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from gti_core.decoding.constraint import ConstraintIndex
from gti_core.lm import SidLM
from gti_core.onboarding.own import OwnPrompts
from gti_core.onboarding.probes import ProbeBeams, search_prefixes
from gti_core.types import FloatArray, IntArray, LongArray, Sid

BEAM_WIDTH = 20
VOTERS = 10
"""Nearest known items whose prefixes have a vote; the others' are candidates without one."""
VOTE = 0.3
"""What all votes together count, where being first in every beam counts 1."""
_ITEMS_AT_ONCE = 32
"""Bounds memory: beams hold a state per prefix."""


def choose_prefixes(
    lm: SidLM,
    index: ConstraintIndex,
    prompts: Sequence[OwnPrompts],
    candidates: Sequence[Mapping[Sid, float]],
    *,
    by_text: bool,
) -> tuple[list[Sid], ProbeBeams | None]:
    """A prefix for each of M items, and the beams after their texts.

    Args:
        lm: the model.
        index: constraint index of the version they are added to.
        prompts: of each item.
        candidates: prefixes in service with their votes, see `candidate_prefixes`.
        by_text: whether the model knows texts; else histories alone are asked.

    Returns:
        The prefixes, and the beams of all items' texts, in order; None where no texts are asked.
    """
    found: list[Sid] = []
    after_texts: list[ProbeBeams] = []
    for start in range(0, len(prompts), _ITEMS_AT_ONCE):
        part = prompts[start : start + _ITEMS_AT_ONCE]
        asked: list[Sequence[int]] = []
        seen: list[frozenset[int]] = []
        places: list[tuple[LongArray, LongArray]] = []
        for own in part:
            texts = own.texts if by_text else ()
            first = len(asked)
            middle = first + len(own.histories)
            asked.extend([*own.histories, *texts])
            seen.extend([*own.seen, *[frozenset[int]()] * len(texts)])
            places.append((np.arange(first, middle), np.arange(middle, len(asked))))
        nothing = [-1] * len(asked)
        beams = search_prefixes(lm, index, asked, seen, nothing, beam_width=BEAM_WIDTH)
        for number, (histories, texts_) in enumerate(places):
            found.append(best_prefix(beams, histories, texts_, candidates[start + number]))
        if by_text:
            after_texts.append(beams.some(np.concatenate([texts_ for _, texts_ in places])))
    return found, ProbeBeams.joined(after_texts) if by_text else None


def candidate_prefixes(sids: IntArray, rows: LongArray, weights: FloatArray) -> dict[Sid, float]:
    """Prefixes of an item's neighbours, and the share of the votes that each has.

    Args:
        sids: SIDs by catalogue row, [N, L].
        rows: neighbours, nearest first, [R].
        weights: of each, [R].
    """
    votes: defaultdict[Sid, float] = defaultdict(float)
    total = float(weights[:VOTERS].sum())
    for place, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        prefix = tuple(int(code) for code in sids[row, :-1])
        votes[prefix] += float(weight) / total if place < VOTERS else 0.0
    return dict(votes)


def best_prefix(
    beams: ProbeBeams, histories: LongArray, texts: LongArray, votes: Mapping[Sid, float]
) -> Sid:
    """The candidate that stands highest in the beams; the first of equals, the nearest item's.

    Args:
        beams: of all prompts.
        histories: numbers of the prompts that are histories.
        texts: numbers of those that are the item's text; their prefixes are candidates too.
        votes: see `candidate_prefixes`.
    """
    scores = {prefix: VOTE * share for prefix, share in votes.items()}
    for prompts, more in ((histories, False), (texts, True)):
        for prompt in prompts:
            for place, prefix in enumerate(map(tuple, beams.prefixes[prompt].tolist())):
                if np.isfinite(beams.scores[prompt, place]) and (more or prefix in scores):
                    rank = 1.0 / (1 + place) / len(prompts)
                    scores[prefix] = scores.get(prefix, 0.0) + rank
    return max(scores, key=lambda prefix: scores[prefix])
