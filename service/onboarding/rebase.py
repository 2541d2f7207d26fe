"""Moving a job's delta from the version it was made on to the one that is current."""

from __future__ import annotations

from dataclasses import replace

from gti_core.bundle.delta import Delta
from gti_core.errors import BundleError
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
