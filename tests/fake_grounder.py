"""A grounder without a model: new items get codes of their own and made-up rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gti_core.bundle.delta import CatalogState, Delta, Rows
from gti_core.catalog import Item
from gti_core.data.dataset import ItemText
from gti_core.errors import GroundingError
from gti_core.onboarding.proposal import STAGES, ItemVerdict, Proposal, Report

WIDTH = 4


class FakeGrounder:
    """Titles tell it what to do: "reject", "hopeless" (GroundingError), "fault" (a bug)."""

    def __init__(self) -> None:
        self.loaded = False
        self.calls: list[tuple[tuple[str, ...], int]] = []
        """Item ids and first code of each call."""

    def load(self) -> None:
        """Nothing to load."""
        self.loaded = True

    def propose(
        self, state: CatalogState, items: Sequence[ItemText], first_code: int, report: Report
    ) -> Proposal:
        """See `Grounder.propose`."""
        self.calls.append((tuple(item.item_id for item in items), first_code))
        for stage in STAGES:
            report(stage, 0, len(items))
        titles = [item.title for item in items]
        if "hopeless" in titles:
            raise GroundingError("these can't be grounded")
        if "fault" in titles:
            raise RuntimeError("secret path")
        verdicts = tuple(
            ItemVerdict(
                item.item_id,
                item.title != "reject",
                ("unlike its text",) if item.title == "reject" else (),
                {"rank": 1},
            )
            for item in items
        )
        passed = [item for item, one in zip(items, verdicts, strict=True) if one.passed]
        if not passed:
            return Proposal(None, verdicts, ("no item passed",), {"recall": 0.5})
        return Proposal(delta_for(state, passed, first_code), verdicts, (), {"recall": 1.0})


def delta_for(state: CatalogState, items: Sequence[ItemText], first_code: int) -> Delta:
    """A delta that gives each item a code of its own at the last level."""
    last = state.vocabulary.levels - 1
    vocabulary = state.vocabulary.skip_to(last, first_code).activate(last, len(items))
    added = tuple(
        Item(
            item.item_id,
            (0,) * last + (first_code + n,),
            item.title.strip(),
            item.description,
            dict(item.attributes),
        )
        for n, item in enumerate(items)
    )
    numbers = [vocabulary.row(last, first_code + n) for n in range(len(items))]
    values = np.array(numbers, dtype=np.float32)[:, None] + np.arange(WIDTH, dtype=np.float32)
    return Delta(vocabulary, added, rows=Rows(np.array(numbers, dtype=np.int64), values))
