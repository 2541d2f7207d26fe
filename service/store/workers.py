"""Which grounding workers there are, as they say themselves."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from service.store.database import Database, now, workers

FRESH_S = 15.0
"""A worker that was silent for longer counts as gone."""
_FORGOTTEN_S = 3600.0


@dataclass(frozen=True)
class WorkerCounts:
    """Workers heard of lately.

    Args:
        ready: take jobs.
        starting: still load the model.
    """

    ready: int
    starting: int


class Workers:
    """The list of workers in a store. Used from any thread; every call blocks."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def beat(self, name: str, *, ready: bool) -> None:
        """Say that a worker is there. Raises StoreError."""
        time = now()
        with self._database.write(lock=False) as connection:
            connection.execute(workers.delete().where(workers.c.seen_at < time - _FORGOTTEN_S))
            updated = connection.execute(
                workers.update().where(workers.c.name == name).values(seen_at=time, ready=ready)
            )
            if not updated.rowcount:
                connection.execute(workers.insert().values(name=name, seen_at=time, ready=ready))

    def leave(self, name: str) -> None:
        """Say that a worker ends. Raises StoreError."""
        with self._database.write(lock=False) as connection:
            connection.execute(workers.delete().where(workers.c.name == name))

    def counts(self) -> WorkerCounts:
        """How many there are. Raises StoreError."""
        query = (
            sa.select(workers.c.ready, sa.func.count())
            .where(workers.c.seen_at >= now() - FRESH_S)
            .group_by(workers.c.ready)
        )
        with self._database.read() as connection:
            found = {bool(ready): count for ready, count in connection.execute(query)}
        return WorkerCounts(found.get(True, 0), found.get(False, 0))
