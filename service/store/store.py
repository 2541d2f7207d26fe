"""Store: one database that belongs to one bundle."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gti_core.data.files import locked_folder
from gti_core.vocabulary import SidVocabulary
from service.store import codes
from service.store.database import FORMAT, Database, activations, head, now, versions
from service.store.errors import DamagedStoreError, StoreError
from service.store.jobs import Jobs
from service.store.standby import Standby
from service.store.versions import Versions
from service.store.workers import WorkerCounts, Workers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreSummary:
    """How a store stands.

    Args:
        jobs: state -> number of jobs.
        codes_left: reserved codes left for new items.
        workers: workers heard of lately.
    """

    jobs: Mapping[str, int]
    codes_left: int
    workers: WorkerCounts


class Store:
    """Versions and jobs of one bundle. Used from any thread; every call blocks.

    Args:
        url: a database URL, or the path of a SQLite file. Made where it is missing.
        bundle_name: name of the bundle, for people.
        bundle_digest: digest of the bundle, hex: what the store belongs to.
        vocabulary: the bundle's vocabulary.
        restore: put the copy that `keep_copy` made in the place of a damaged SQLite file.

    Raises:
        StoreError: can't be reached, is damaged or foreign, or belongs to another bundle.
    """

    def __init__(
        self,
        url: str,
        bundle_name: str,
        bundle_digest: str,
        vocabulary: SidVocabulary,
        *,
        restore: bool = False,
    ) -> None:
        self._database = Database(url)
        self.name = self._database.name
        """The store's name in messages."""
        file = self._database.file
        self._standby = None if file is None else Standby(file)
        try:
            self._prepare(restore)
            with self._database.write() as connection:
                if connection.execute(sa.select(head.c.id)).first() is None:
                    _begin(connection, bundle_name, bundle_digest, vocabulary)
                else:
                    self._check(connection, bundle_name, bundle_digest)
        except BaseException:
            self.close()
            raise
        self.versions = Versions(self._database)
        self.jobs = Jobs(self._database)
        self.workers = Workers(self._database)

    def codes_left(self) -> int:
        """Reserved codes left for new items: how many can still be onboarded."""
        with self._database.read() as connection:
            return codes.left(connection)

    def summary(self) -> StoreSummary:
        """How it stands, for metrics. Raises StoreError."""
        return StoreSummary(self.jobs.counts(), self.codes_left(), self.workers.counts())

    def keep_copy(self) -> bool:
        """Refresh the copy of a SQLite file; false if that is not due yet. Failures are logged."""
        if self._standby is None:
            return True
        try:
            return self._standby.refresh()
        except (OSError, sqlite3.Error) as error:
            logger.error("%s can't be copied to %s: %s", self.name, self._standby.path, error)
            return True

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._database.close()

    def _prepare(self, restore: bool) -> None:
        if not restore or self._standby is None or not self._standby.path.parent.is_dir():
            self._database.prepare()
            return
        # Looked at under the lock: who closes a file that was put aside meanwhile would take the
        # write-ahead log of the one in its place with it, since SQLite deletes it by its name.
        with locked_folder(self._standby.path.parent):
            try:
                self._look(self._standby)
            except DamagedStoreError as error:
                self._database.close()
                self._restore(self._standby, error)

    def _look(self, standby: Standby) -> None:
        if standby.is_emptied():
            raise DamagedStoreError(f"{self.name} is empty, and its copy is not")
        self._database.prepare()

    def _restore(self, standby: Standby, damage: DamagedStoreError) -> None:
        aside = standby.restore()
        if aside is None:
            raise damage
        logger.error(
            "%s; it is %s now, and the copy %s has taken its place: changes since that was "
            "made are lost",
            damage,
            aside,
            standby.path,
        )
        self._database.prepare()

    def _check(self, connection: Connection, name: str, digest: str) -> None:
        row = connection.execute(sa.select(head)).one()
        if row.format != FORMAT:
            raise StoreError(f"{self.name} has format {row.format!r}, this version reads {FORMAT}")
        if row.bundle_digest != digest:
            raise StoreError(
                f"{self.name} belongs to bundle {row.bundle_name!r} ({row.bundle_digest[:12]}), "
                f"not to {name!r} ({digest[:12]}): serve that bundle, or choose another store "
                "with --store"
            )


def _begin(connection: Connection, name: str, digest: str, vocabulary: SidVocabulary) -> None:
    time = now()
    connection.execute(
        versions.insert().values(
            number=1,
            kind="base",
            created_at=time,
            digest=digest,
            document="",
            code_end=vocabulary.active[-1],
            added=0,
            retired=0,
            served_at=time,
        )
    )
    connection.execute(
        head.insert().values(
            id=1,
            format=FORMAT,
            bundle_digest=digest,
            bundle_name=name,
            codes=vocabulary.sizes[-1],
            current=1,
        )
    )
    connection.execute(activations.insert().values(number=1, previous=None, at=time))
