"""What the grounding of new items hands over: a delta to publish, or the reasons against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gti_core.bundle.delta import CatalogState, Delta
from gti_core.types import ItemId, JsonDict

if TYPE_CHECKING:
    from gti_core.data.dataset import ItemText

STAGES = ("encoding", "assigning", "grounding", "validating")

Report = Callable[[str, int, int], None]
"""Called with (stage, items done, items). Raises to stop the work."""


@dataclass(frozen=True)
class ItemVerdict:
    """What the gate says of one item.

    Args:
        item_id: the item.
        passed: whether it may be published.
        reasons: what speaks against it, in words; empty when it passed.
        figures: what was measured, JSON values.
    """

    item_id: ItemId
    passed: bool
    reasons: tuple[str, ...] = ()
    figures: JsonDict = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """The outcome for a batch of items; those that passed are published together.

    Args:
        delta: what to publish; None when no item passed, or the batch as a whole did not.
        verdicts: one per item, in the order given.
        reasons: what speaks against the batch as a whole.
        figures: what was measured on the batch, JSON values.
    """

    delta: Delta | None
    verdicts: tuple[ItemVerdict, ...]
    reasons: tuple[str, ...] = ()
    figures: JsonDict = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether it may be published."""
        return self.delta is not None


class Grounder(Protocol):
    """Turns item texts into a proposal. Built once per worker; not thread-safe."""

    def load(self) -> None:
        """Load models and caches. May take a minute. Raises GtiError."""
        ...

    def propose(
        self, state: CatalogState, items: Sequence[ItemText], first_code: int, report: Report
    ) -> Proposal:
        """Give new items SIDs and rows on top of a version, and judge them.

        Args:
            state: the version they are added to.
            items: 1 to 1,000 items with texts; ids may be known (their rows are superseded).
            first_code: first code of the last level that no version has used.
            report: called as the work goes on.

        Raises:
            GtiError: the items can't be grounded at all.
        """
        ...
