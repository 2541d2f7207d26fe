"""What the store raises.

::

    GtiError
    ├── StoreError                 it can't be read or written, or belongs to something else
    │   └── DamagedStoreError      its file is truncated, overwritten, no database
    └── RefusedError               it won't do what was asked; the message is for the client
        ├── UnknownItemError
        ├── ItemConflictError
        ├── IdempotencyConflictError
        ├── ReserveExhaustedError
        ├── JobNotFoundError
        ├── JobNotCancellableError
        └── VersionNotFoundError
    StaleVersionError              another version became current meanwhile: try again
    JobLostError                   the job was cancelled, or another worker has it
"""

from __future__ import annotations

from typing import ClassVar

from gti_core.errors import GtiError


class StoreError(GtiError):
    """The store can't be used: not reachable, damaged, foreign, or of another bundle."""

    code: ClassVar[str] = "store_unavailable"


class DamagedStoreError(StoreError):
    """The store's file is no database, or a damaged one."""


class RefusedError(GtiError):
    """A request that the store's contents don't allow."""


class UnknownItemError(RefusedError):
    """No item of the catalogue has this id."""


class ItemConflictError(RefusedError):
    """An item id is taken by other content."""


class IdempotencyConflictError(RefusedError):
    """An Idempotency-Key came again with another body."""


class ReserveExhaustedError(RefusedError):
    """More items than reserved codes are left."""


class JobNotFoundError(RefusedError):
    """No job has this id."""


class JobNotCancellableError(RefusedError):
    """The job has ended, or is being published."""


class VersionNotFoundError(RefusedError):
    """No version that can be served has this number."""


class StaleVersionError(Exception):
    """What was computed on one version meets another as the current one."""


class JobLostError(Exception):
    """A worker's claim on a job no longer holds."""
