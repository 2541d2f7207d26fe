"""Moving a job's delta from the version it was made on to the one that is current."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from gti_core.bundle.delta import Delta, Rows
from gti_core.errors import BundleError
from gti_core.types import ItemId
from gti_core.vocabulary import SidVocabulary


def rebased(delta: Delta, vocabulary: SidVocabulary) -> Delta:
    """The same items and rows above another version.

    Args:
        delta: adds items and activates codes that no version has used.
        vocabulary: of the version below.
    """
    codes = set()
    if delta.rows is not None:
        first = vocabulary.first_token_id
        codes = {vocabulary.code(first + int(row)) for row in delta.rows.numbers}
    return replace(delta, vocabulary=_with_codes(vocabulary, codes))


def without(delta: Delta, ids: Collection[ItemId]) -> Delta:
    """A delta less some of the items it adds, and their rows; to be rebased then."""
    added = tuple(item for item in delta.added if item.item_id not in ids)
    rows = delta.rows
    if rows is not None:
        last = delta.vocabulary.levels - 1
        kept = [delta.vocabulary.row(last, item.sid[last]) for item in added]
        chosen = np.isin(rows.numbers, kept)
        rows_out = None if rows.rows_out is None else rows.rows_out[chosen]
        rows = Rows(rows.numbers[chosen], rows.rows_in[chosen], rows_out)
    return replace(delta, added=added, rows=rows)


def check_codes(delta: Delta, first_code: int, code_end: int) -> None:
    """Raises BundleError for a delta that activates codes which were not kept for it."""
    if delta.rows is None:
        return
    vocabulary = delta.vocabulary
    for row in delta.rows.numbers:
        level, code = vocabulary.code(vocabulary.first_token_id + int(row))
        if level != vocabulary.levels - 1 or not first_code <= code < code_end:
            raise BundleError(f"code {code} of level {level} was not kept for this job")


def _with_codes(vocabulary: SidVocabulary, codes: set[tuple[int, int]]) -> SidVocabulary:
    # Another job's higher codes may have been published first; then these are among the skipped.
    active = list(vocabulary.active)
    for level, code in codes:
        active[level] = max(active[level], code + 1)
    passed = {
        (level, code)
        for level, end in enumerate(active)
        for code in range(vocabulary.active[level], end)
    }
    return replace(vocabulary, active=tuple(active), skipped=(vocabulary.skipped | passed) - codes)
