"""Versions in the store: a tree of deltas above the base, and which one is current."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gti_core.bundle.delta import Delta, digest
from service.store.database import Database, activations, head, jobs, now, versions
from service.store.errors import (
    JobLostError,
    StaleVersionError,
    StoreError,
    VersionNotFoundError,
)
from service.store.records import (
    FAILED,
    LIVE,
    PUBLISHING,
    WORKING,
    Claim,
    VersionRecord,
)

_LISTED = [column for column in versions.c if column.name not in ("document", "block", "code_end")]


@dataclass(frozen=True)
class Head:
    """What the service looks at again and again.

    Args:
        current: number of the version to be served.
        publishing: whether a job waits for its version to be served.
    """

    current: int
    publishing: bool


class Versions:
    """The versions of a store; every call is one transaction and raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def current(self) -> int:
        """Number of the version to be served."""
        with self._database.read() as connection:
            return _current(connection)

    def current_at(self, time: float) -> int:
        """Number of the version that was to be served at a time, in seconds since 1970."""
        query = (
            sa.select(activations.c.number)
            .where(activations.c.at <= time)
            .order_by(activations.c.id.desc())
            .limit(1)
        )
        with self._database.read() as connection:
            return int(connection.execute(query).scalar() or 1)

    def head(self) -> Head:
        """The current version, and whether a job waits for one."""
        with self._database.read() as connection:
            waiting = connection.execute(
                sa.select(jobs.c.seq).where(jobs.c.state == PUBLISHING).limit(1)
            ).first()
            return Head(_current(connection), waiting is not None)

    def chain(self, number: int) -> tuple[int, ...]:
        """The versions that make up one, from the base to it.

        Raises:
            VersionNotFoundError: no such version.
        """
        with self._database.read() as connection:
            return _chain(connection, number)

    def get(self, number: int) -> VersionRecord:
        """One version. Raises VersionNotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(sa.select(*_LISTED).where(versions.c.number == number)).first()
            if row is None:
                raise VersionNotFoundError(f"there is no version {number}")
            return _record(row, _current(connection))

    def page(self, limit: int, before: int | None = None) -> list[VersionRecord]:
        """Versions, latest first, with numbers below ``before``."""
        query = sa.select(*_LISTED).order_by(versions.c.number.desc()).limit(limit)
        if before is not None:
            query = query.where(versions.c.number < before)
        with self._database.read() as connection:
            current = _current(connection)
            return [_record(row, current) for row in connection.execute(query)]

    def posted(self, number: int, *, above: int, unserved: bool = False) -> list[tuple[int, float]]:
        """What jobs added in the versions that make up one: items, and when their job came.

        Args:
            number: the version.
            above: versions up to this number are left out.
            unserved: leave out versions that any engine has served.

        Returns:
            (items, seconds since 1970) of each job.

        Raises:
            VersionNotFoundError: no such version.
        """
        query = (
            sa.select(versions.c.number, versions.c.added, jobs.c.created_at)
            .join(jobs, jobs.c.id == versions.c.job_id)
            .where(versions.c.number > above)
        )
        if unserved:
            query = query.where(versions.c.served_at.is_(None))
        with self._database.read() as connection:
            inside = set(_chain(connection, number))
            rows = connection.execute(query).all()
        return [(row.added, row.created_at) for row in rows if row.number in inside]

    def delta(self, number: int) -> Delta:
        """The delta of a version above the base.

        Raises:
            VersionNotFoundError: no such version, or the base.
            StoreError: its content is not what its digest says.
        """
        with self._database.read() as connection:
            row = connection.execute(
                sa.select(versions.c.document, versions.c.block, versions.c.digest).where(
                    versions.c.number == number, versions.c.number > 1
                )
            ).first()
        if row is None:
            raise VersionNotFoundError(f"there is no delta of version {number}")
        if digest(row.document, row.block) != row.digest:
            raise StoreError(
                f"{self._database.name}: version {number} is damaged: restore a backup"
            )
        return Delta.parse(row.document, row.block)

    def commit(self, parent: int, kind: str, delta: Delta, *, claim: Claim | None = None) -> int:
        """Add a version above the current one and make it current; returns its number.

        Args:
            parent: the version that the delta was made for.
            kind: onboard, retire, restore or attributes.
            delta: fits on ``parent``, as `CatalogState.apply` says.
            claim: the job it comes from, which becomes "publishing".

        Raises:
            StaleVersionError: ``parent`` is no longer current.
            JobLostError: the claim no longer holds.
        """
        document, block = delta.document(), delta.block()
        with self._database.write() as connection:
            if _current(connection) != parent:
                raise StaleVersionError
            number = connection.execute(sa.select(sa.func.max(versions.c.number))).scalar_one() + 1
            time = now()
            connection.execute(
                versions.insert().values(
                    number=number,
                    parent=parent,
                    kind=kind,
                    created_at=time,
                    job_id=None if claim is None else claim.job_id,
                    digest=digest(document, block),
                    document=document,
                    block=block,
                    code_end=delta.vocabulary.active[-1],
                    added=len(delta.added),
                    retired=len(delta.retired),
                )
            )
            if claim is not None:
                done = connection.execute(
                    jobs.update()
                    .where(*holds(claim))
                    .values(
                        state=PUBLISHING,
                        version=number,
                        worker=None,
                        lease_until=None,
                        updated_at=time,
                    )
                )
                if done.rowcount != 1:
                    raise JobLostError(claim.job_id)
            _activate(connection, number)
            return int(number)

    def activate(self, number: int) -> None:
        """Make a version current: a rollback, or forward again.

        Raises:
            VersionNotFoundError: no such version, or the engine has refused it.
        """
        with self._database.write() as connection:
            row = connection.execute(
                sa.select(versions.c.refused).where(versions.c.number == number)
            ).first()
            if row is None:
                raise VersionNotFoundError(f"there is no version {number}")
            if row.refused is not None:
                raise VersionNotFoundError(f"the engine did not take version {number}")
            _activate(connection, number)

    def mark_served(self, number: int) -> None:
        """Record that an engine serves a version; jobs that waited for it become live.

        A job whose version was rolled back before any engine served it has failed.
        """
        with self._database.write() as connection:
            time = now()
            connection.execute(
                versions.update()
                .where(versions.c.number == number, versions.c.served_at.is_(None))
                .values(served_at=time)
            )
            waiting = connection.execute(
                sa.select(jobs.c.seq, jobs.c.version).where(jobs.c.state == PUBLISHING)
            ).all()
            if not waiting:
                return
            inside = set(_chain(connection, number))
            settled = _current(connection) == number
            for job in waiting:
                if job.version in inside:
                    outcome = {"state": LIVE}
                elif settled:
                    reason = f"version {job.version} was rolled back before it was served"
                    outcome = {"state": FAILED, "error": reason}
                else:
                    continue
                connection.execute(
                    jobs.update().where(jobs.c.seq == job.seq).values(**outcome, updated_at=time)
                )

    def refuse(self, number: int, reason: str, served: int) -> None:
        """Turn back from a version that the engine did not take.

        One that was never served is marked, its parent becomes current and its job has failed;
        from one that was served before, the way back is to the version ``served`` now.
        """
        with self._database.write() as connection:
            row = connection.execute(
                sa.select(versions.c.served_at).where(versions.c.number == number)
            ).one()
            target = served
            if row.served_at is None:
                time = now()
                connection.execute(
                    versions.update().where(versions.c.number == number).values(refused=reason)
                )
                connection.execute(
                    jobs.update()
                    .where(jobs.c.version == number, jobs.c.state == PUBLISHING)
                    .values(state=FAILED, error=reason, version=None, updated_at=time)
                )
                target = _last_good(connection, number)
            if _current(connection) == number:
                _activate(connection, target)


def holds(claim: Claim) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions under which a claim's job still belongs to it."""
    return (
        jobs.c.id == claim.job_id,
        jobs.c.worker == claim.worker,
        jobs.c.attempts == claim.attempt,
        jobs.c.state.in_(WORKING),
    )


def current_in(connection: Connection) -> int:
    """The current version inside a transaction."""
    return _current(connection)


def chain_in(connection: Connection, number: int) -> tuple[int, ...]:
    """`Versions.chain` inside a transaction."""
    return _chain(connection, number)


def _current(connection: Connection) -> int:
    return int(connection.execute(sa.select(head.c.current)).scalar_one())


def _chain(connection: Connection, number: int) -> tuple[int, ...]:
    rows = connection.execute(sa.select(versions.c.number, versions.c.parent))
    parents: dict[int, int | None] = {row.number: row.parent for row in rows}
    if number not in parents:
        raise VersionNotFoundError(f"there is no version {number}")
    chain = []
    step: int | None = number
    while step is not None:
        chain.append(step)
        step = parents[step]
    return tuple(reversed(chain))


def _last_good(connection: Connection, number: int) -> int:
    refused = set(
        connection.execute(
            sa.select(versions.c.number).where(versions.c.refused.is_not(None))
        ).scalars()
    )
    return next(n for n in reversed(_chain(connection, number)) if n not in refused)


def _activate(connection: Connection, number: int) -> None:
    previous = _current(connection)
    if previous == number:
        return
    connection.execute(head.update().values(current=number))
    connection.execute(activations.insert().values(number=number, previous=previous, at=now()))


def _record(row: Any, current: int) -> VersionRecord:
    return VersionRecord(
        row.number,
        row.parent,
        row.kind,
        row.created_at,
        row.added,
        row.retired,
        row.job_id,
        row.digest,
        row.served_at is not None,
        row.refused,
        row.number == current,
    )
