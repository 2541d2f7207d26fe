"""Every error that ``gti_core`` raises on purpose.

::

    GtiError
    ├── DataError            a file, row or column that can't be read
    ├── CatalogError         items or SIDs that contradict each other
    ├── VocabularyError      a code, level or token id outside the vocabulary
    ├── BundleError          a bundle that can't be used
    │   └── BundleCorruptError   a file that does not match its digest
    ├── PipelineError        a stage folder that is missing, foreign or unfinished
    ├── DecodingError        a request that the decoder can't answer
    ├── UnsupportedModelError    a backbone that can't take new rows
    └── GroundingError       new items that can't be grounded
        └── ReserveExhaustedError    fewer reserved codes than new items
"""

from __future__ import annotations

from typing import ClassVar


class GtiError(Exception):
    """Base class. ``code`` is stable and machine-readable; the message is for people."""

    code: ClassVar[str] = "gti_error"


class DataError(GtiError):
    """Input data can't be used. Names the file, and where known the row and column.

    Args:
        message: what is wrong, for a person.
        file: the file's path as given by the caller.
        row: 1-based line or record number in that file, if known.
        column: the column's name, if known.
    """

    code = "data_invalid"

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        where = [
            part
            for part in (
                file,
                None if row is None else f"row {row}",
                None if column is None else f"column {column!r}",
            )
            if part
        ]
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.file = file
        self.row = row
        self.column = column


class CatalogError(GtiError):
    """Items or semantic IDs contradict each other (duplicate id, shared SID, wrong depth)."""

    code = "catalog_invalid"


class VocabularyError(GtiError):
    """A level, code, token id or token text lies outside the SID vocabulary."""

    code = "vocabulary_invalid"


class BundleError(GtiError):
    """A bundle can't be used: missing files, unknown format, contradicting shapes."""

    code = "bundle_invalid"


class BundleCorruptError(BundleError):
    """A bundle file differs from the digest in its manifest."""

    code = "bundle_corrupt"

    def __init__(self, file: str, expected: str, actual: str) -> None:
        super().__init__(f"{file}: sha256 is {actual}, the manifest says {expected}")
        self.file = file
        self.expected = expected
        self.actual = actual


class PipelineError(GtiError):
    """A pipeline stage can't start: its input folder is missing, foreign or unfinished."""

    code = "pipeline_invalid"


class DecodingError(GtiError):
    """A decoding request can't be answered as asked."""

    code = "decoding_invalid"


class UnsupportedModelError(GtiError):
    """The backbone can't take new vocabulary rows (for instance a head with a bias)."""

    code = "model_unsupported"


class GroundingError(GtiError):
    """Items can't be grounded."""

    code = "grounding_failed"


class ReserveExhaustedError(GroundingError):
    """Fewer reserved codes are left than new items need.

    Args:
        left: reserved codes left.
        wanted: codes needed.
    """

    code = "reserve_exhausted"

    def __init__(self, left: int, wanted: int) -> None:
        super().__init__(f"{wanted} reserved codes are needed, {left} are left")
        self.left = left
        self.wanted = wanted
