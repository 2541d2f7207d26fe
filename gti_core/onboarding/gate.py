"""The gate: what new items must show before they are served, and what must not suffer.

Per item: what it says of itself leads back to it. Per batch: held-out histories still find their
old items, and no new item pushes itself into everybody's list (text can be written to do that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gti_core.onboarding.proposal import ItemVerdict
from gti_core.types import ItemId, JsonDict, LongArray


@dataclass(frozen=True)
class GateOptions:
    """Limits.

    Args:
        k: length of the lists that old items are looked for in.
        own_k: length of the lists that a new item's own prompts must lead to it in.
        least_own: share of an item's own prompts whose list must hold it.
        most_drop: largest relative drop of the old items' Recall@k on the probes.
        most_lists: largest share of the probes' lists that one new item may stand in.
        least_ability: share of old items that their own text must lead to for texts to be asked;
            a model below it is asked by histories of similar items instead.
        least_similarity: of the text to the nearest known item's.
    """

    k: int = 10
    own_k: int = 20
    least_own: float = 0.5
    most_drop: float = 0.01
    most_lists: float = 0.1
    least_ability: float = 0.5
    least_similarity: float = 0.35


@dataclass(frozen=True)
class BatchVerdict:
    """What the gate says of a batch.

    Args:
        items: one per item.
        reasons: what speaks against the batch as a whole.
        figures: what was measured on it.
    """

    items: tuple[ItemVerdict, ...]
    reasons: tuple[str, ...]
    figures: JsonDict

    @property
    def passed(self) -> bool:
        """Whether every item and the batch passed."""
        return not self.reasons and all(item.passed for item in self.items)


def judge(
    item_ids: Sequence[ItemId],
    rows: Sequence[int],
    own: Sequence[LongArray],
    similarity: Sequence[float],
    before: LongArray,
    after: LongArray,
    targets: LongArray,
    options: GateOptions,
    *,
    by_text: bool,
) -> BatchVerdict:
    """Judge a batch by lists of catalogue rows, best first.

    Args:
        item_ids: M new items.
        rows: their catalogue rows.
        own: per item, the lists of its own prompts, [prompts, own_k].
        similarity: per item, cosine of its text to the nearest known item's.
        before: the probes' lists without the batch, [P, k].
        after: the probes' lists with it, [P, k].
        targets: what came next in each probe, [P].
        options: limits.
        by_text: whether the own prompts are texts; else histories of similar items.
    """
    asked_by = "own text" if by_text else "similar items' histories"
    hits_before = int((before == targets[:, None]).any(axis=1).sum())
    hits_after = int((after == targets[:, None]).any(axis=1).sum())
    drop = (hits_before - hits_after) / max(1, hits_before)
    probes = len(targets)
    figures: JsonDict = {
        "probes": probes,
        f"old_recall@{options.k}_before": round(hits_before / max(1, probes), 4),
        f"old_recall@{options.k}_after": round(hits_after / max(1, probes), 4),
        "relative_drop": round(drop, 4),
    }
    reasons = []
    # A single hit more or less says nothing where there are few.
    if drop > options.most_drop and hits_before - hits_after > 1:
        reasons.append(
            f"old items lose {drop:.1%} of Recall@{options.k} on {probes} held-out histories "
            f"({hits_before} hits before, {hits_after} after), at most {options.most_drop:.0%} is "
            "allowed"
        )
    verdicts = []
    for item_id, row, lists, alike in zip(item_ids, rows, own, similarity, strict=True):
        found = (lists == row).any(axis=1)
        ranks = np.argmax(lists == row, axis=1)[found] + 1
        share = float((after == row).any(axis=1).mean()) if probes else 0.0
        complaints = []
        if found.mean() < options.least_own:
            complaints.append(
                f"{int(found.sum())} of {len(found)} prompts ({asked_by}) lead to it within "
                f"{options.own_k}; at least {options.least_own:.0%} must"
            )
        # A row can be fitted to any text, so leading back to it is not enough.
        if alike < options.least_similarity:
            complaints.append(
                f"its text is unlike every known item's: similarity {alike:.2f}, at least "
                f"{options.least_similarity:.2f} is needed"
            )
        if share > options.most_lists:
            complaints.append(
                f"it stands in {share:.1%} of the lists of {probes} held-out histories, at most "
                f"{options.most_lists:.0%} is allowed"
            )
        verdicts.append(
            ItemVerdict(
                item_id,
                not complaints,
                tuple(complaints),
                {
                    "asked_by": asked_by,
                    "own_share": round(float(found.mean()), 4),
                    "own_best_rank": int(ranks.min()) if len(ranks) else None,
                    "list_share": round(share, 4),
                    "similarity": round(alike, 4),
                },
            )
        )
    return BatchVerdict(tuple(verdicts), tuple(reasons), figures)
