"""A batch of new items on its way through the gate, and parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gti_core.bundle.delta import CatalogState, Delta, Rows
from gti_core.catalog import Item
from gti_core.onboarding.assign import assign_new
from gti_core.types import FloatArray, LongArray, Sid

if TYPE_CHECKING:
    from gti_core.onboarding.probes import ProbeBeams


@dataclass(frozen=True, eq=False)
class Batch:
    """New items with their prefixes and rows, and the version they are added to."""

    state: CatalogState
    items: Sequence[Item]
    prefixes: Sequence[Sid]
    rows: tuple[FloatArray, FloatArray | None]
    first_code: int

    def delta(self, chosen: Sequence[int]) -> Delta:
        """Some of the items, with the codes that follow each other from the first one on."""
        prefixes = [self.prefixes[number] for number in chosen]
        assigned, vocabulary = assign_new(prefixes, self.state.vocabulary, self.first_code)
        added = tuple(
            replace(self.items[number], sid=sid)
            for number, sid in zip(chosen, assigned, strict=True)
        )
        last = vocabulary.levels - 1
        numbers = np.array([vocabulary.row(last, sid[-1]) for sid in assigned], dtype=np.int64)
        rows_in, rows_out = self.rows
        picked = list(chosen)
        rows = Rows(numbers, rows_in[picked], None if rows_out is None else rows_out[picked])
        return Delta(vocabulary, added, rows=rows)


@dataclass(frozen=True, eq=False)
class Asked:
    """Beams of the prompts that new items are to be found by, and whose each prompt is."""

    beams: ProbeBeams
    owners: LongArray


def owners_of(counts: Sequence[int]) -> LongArray:
    """Whose each prompt is, where item i has ``counts[i]`` of them, one item after another."""
    return np.repeat(np.arange(len(counts)), counts)
