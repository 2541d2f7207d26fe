"""Jobs in the store: submitted by the service, claimed and worked on by workers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from gti_core.types import ItemId, JsonDict
from service.store import codes
from service.store.database import Database, head, job_items, jobs, now
from service.store.errors import (
    IdempotencyConflictError,
    JobLostError,
    JobNotCancellableError,
    JobNotFoundError,
    ReserveExhaustedError,
    StaleVersionError,
)
from service.store.records import (
    CANCELLED,
    FAILED,
    LIVE,
    QUEUED,
    REJECTED,
    WORKING,
    Claim,
    JobRecord,
    items_from_json,
    items_to_json,
    job_record,
)
from service.store.submission import Catalogued, Submission, sort_out
from service.store.versions import current_in, holds

MAX_ATTEMPTS = 3

# What can be large stays in the store while jobs are listed.
_LISTED = (
    *(c for c in jobs.c if c.name not in ("items", "result", "document", "block")),
    sa.literal("[]").label("items"),
    sa.null().label("result"),
)
_FREED: Mapping[str, Any] = {"worker": None, "lease_until": None}
_NO_CODES: Mapping[str, Any] = {"first_code": None, "code_end": None}


class Jobs:
    """The jobs of a store; every call is one transaction and raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(
        self, submission: Submission, version: int, catalogued: Mapping[ItemId, Catalogued]
    ) -> tuple[JobRecord, bool]:
        """Accept items; returns the job and whether it is new.

        Args:
            submission: the request.
            version: the version that ``catalogued`` tells of.
            catalogued: those of the request's ids that the version's catalogue has.

        Raises:
            StaleVersionError: ``version`` is no longer current.
            IdempotencyConflictError: the key came with another body before.
            ItemConflictError: an id is taken by other content, or waits in another job.
            ReserveExhaustedError: more items than codes are left.
        """
        with self._database.write() as connection:
            if submission.key is not None:
                row = connection.execute(
                    sa.select(jobs).where(jobs.c.idempotency_key == submission.key)
                ).first()
                if row is not None:
                    if row.body_hash != submission.body_hash:
                        raise IdempotencyConflictError(
                            f"Idempotency-Key {submission.key!r} was used with another body"
                        )
                    return job_record(row), False
            if current_in(connection) != version:
                raise StaleVersionError
            todo, known, same = sort_out(connection, submission, version, catalogued)
            if same is not None:
                return _get(connection, same), False
            left = codes.left(connection)
            if len(todo) > left:
                raise ReserveExhaustedError(
                    f"{len(todo)} items need as many reserved codes, {left} are left"
                )
            time = now()
            job_id = uuid.uuid4().hex
            seq = connection.execute(
                jobs.insert().values(
                    id=job_id,
                    kind="onboard",
                    state=QUEUED if todo else LIVE,
                    created_at=time,
                    updated_at=time,
                    idempotency_key=submission.key,
                    body_hash=submission.body_hash,
                    items=items_to_json(todo),
                    todo=len(todo),
                    known=json.dumps(known),
                    attempts=0,
                    version=None if todo else version,
                )
            ).inserted_primary_key
            assert seq is not None
            if todo:
                connection.execute(
                    job_items.insert(),
                    [
                        {
                            "job": seq[0],
                            "item_id": item.item_id,
                            "content": submission.contents[item.item_id],
                        }
                        for item in todo
                    ],
                )
            return _get(connection, job_id), True

    def get(self, job_id: str) -> JobRecord:
        """One job. Raises JobNotFoundError."""
        with self._database.read() as connection:
            return _get(connection, job_id)

    def state(self, job_id: str) -> str:
        """A job's state. Raises JobNotFoundError."""
        with self._database.read() as connection:
            state = connection.execute(sa.select(jobs.c.state).where(jobs.c.id == job_id)).scalar()
        if state is None:
            raise JobNotFoundError(f"there is no job {job_id}")
        return str(state)

    def page(
        self, limit: int, *, state: str | None = None, before: int | None = None
    ) -> list[JobRecord]:
        """Jobs, latest first, with ``seq`` below ``before``; without items and result."""
        query = sa.select(*_LISTED).order_by(jobs.c.seq.desc()).limit(limit)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if before is not None:
            query = query.where(jobs.c.seq < before)
        with self._database.read() as connection:
            return [job_record(row) for row in connection.execute(query)]

    def counts(self) -> dict[str, int]:
        """How many jobs are in each state; states without one are left out."""
        query = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state)
        with self._database.read() as connection:
            return {str(state): int(count) for state, count in connection.execute(query)}

    def cancel(self, job_id: str) -> JobRecord:
        """Cancel a job that is not being published; its codes are free again.

        Raises:
            JobNotFoundError: no such job.
            JobNotCancellableError: too late. A job that is cancelled already is no error.
        """
        with self._database.write() as connection:
            job = _get(connection, job_id)
            if job.state == CANCELLED:
                return job
            if job.state not in (QUEUED, *WORKING):
                raise JobNotCancellableError(f"job {job_id} is {job.state}")
            _set(connection, [jobs.c.id == job_id], state=CANCELLED, **_FREED)
            return _get(connection, job_id)

    # For workers

    def claim(self, worker: str, lease_s: float) -> Claim | None:
        """The oldest job that waits, this worker's for ``lease_s`` seconds; None: nothing to do.

        Codes are kept for it. A job for which none are left any more has failed.
        """
        with self._database.write() as connection:
            _expire(connection)
            total = int(connection.execute(sa.select(head.c.codes)).scalar_one())
            while True:
                row = connection.execute(
                    sa.select(jobs).where(jobs.c.state == QUEUED).order_by(jobs.c.seq).limit(1)
                ).first()
                if row is None:
                    return None
                items = items_from_json(row.items)
                first, end = row.first_code, row.code_end
                if first is None:
                    first = codes.first_free(connection)
                    end = first + len(items)
                if end <= total:
                    break
                reason = f"{len(items)} items need as many reserved codes, {total - first} are left"
                _set(connection, [jobs.c.seq == row.seq], state=FAILED, error=reason)
            _set(
                connection,
                [jobs.c.seq == row.seq],
                state=WORKING[0],
                attempts=row.attempts + 1,
                worker=worker,
                lease_until=now() + lease_s,
                first_code=first,
                code_end=end,
                progress=None,
            )
            proposal = None
            if row.document is not None:
                proposal = (row.base_version, row.document, row.block)
            return Claim(row.id, worker, row.attempts + 1, items, first, end, proposal)

    def renew(self, claim: Claim, lease_s: float) -> None:
        """Prolong the lease. Raises JobLostError."""
        self._update(claim, touch=False, lease_until=now() + lease_s)

    def progress(self, claim: Claim, stage: str, done: int, of: int) -> None:
        """Record how far the work is. Raises JobLostError."""
        progress = json.dumps({"stage": stage, "done": done, "of": of})
        self._update(claim, state=stage, progress=progress)

    def propose(
        self,
        claim: Claim,
        base_version: int,
        document: str,
        block: bytes | None,
        code_end: int,
        result: JsonDict,
    ) -> None:
        """Keep a delta that passed, with the codes it uses. Raises JobLostError."""
        self._update(
            claim,
            base_version=base_version,
            document=document,
            block=block,
            code_end=code_end,
            result=json.dumps(result, allow_nan=False),
        )

    def reject(self, claim: Claim, result: JsonDict) -> None:
        """End a job whose items did not pass. Raises JobLostError."""
        self._update(claim, state=REJECTED, result=json.dumps(result, allow_nan=False), **_FREED)

    def fail(self, claim: Claim, reason: str, *, final: bool = False) -> None:
        """Queue a job again, or end it: after the last attempt, or when another has no point.

        Raises:
            JobLostError: the claim no longer holds.
        """
        again = not final and claim.attempt < MAX_ATTEMPTS
        self._update(
            claim,
            state=QUEUED if again else FAILED,
            error=reason,
            document=None,
            block=None,
            base_version=None,
            **_NO_CODES,
            **_FREED,
        )

    def restart(self, claim: Claim) -> None:
        """Queue a job again whose proposal no longer fits. Raises JobLostError."""
        self._update(
            claim,
            state=QUEUED,
            attempts=claim.attempt - 1,
            document=None,
            block=None,
            base_version=None,
            **_NO_CODES,
            **_FREED,
        )

    def release(self, worker: str) -> None:
        """Give back what a worker holds that ended in good order: no attempt is counted."""
        with self._database.write() as connection:
            _requeue(
                connection,
                [jobs.c.worker == worker, jobs.c.state.in_(WORKING)],
                attempts=jobs.c.attempts - 1,
            )

    def abandon(self, worker: str) -> None:
        """Take back what a worker holds that is dead. The attempt counts."""
        with self._database.write() as connection:
            _expire(connection, jobs.c.worker == worker)

    def expire(self) -> None:
        """Take back the jobs whose lease is over."""
        with self._database.read() as connection:
            late = connection.execute(sa.select(jobs.c.seq).where(*_late()).limit(1)).first()
        if late is not None:
            with self._database.write() as connection:
                _expire(connection)

    def _update(self, claim: Claim, *, touch: bool = True, **values: Any) -> None:
        with self._database.write() as connection:
            if _set(connection, holds(claim), touch=touch, **values) != 1:
                raise JobLostError(claim.job_id)


def _get(connection: Connection, job_id: str) -> JobRecord:
    row = connection.execute(sa.select(jobs).where(jobs.c.id == job_id)).first()
    if row is None:
        raise JobNotFoundError(f"there is no job {job_id}")
    return job_record(row)


def _set(
    connection: Connection,
    where: Iterable[sa.ColumnElement[bool]],
    *,
    touch: bool = True,
    **values: Any,
) -> int:
    if touch:
        values["updated_at"] = now()
    return connection.execute(jobs.update().where(*where).values(**values)).rowcount


def _late() -> tuple[sa.ColumnElement[bool], ...]:
    return (jobs.c.state.in_(WORKING), jobs.c.lease_until < now())


def _expire(connection: Connection, *where: sa.ColumnElement[bool]) -> None:
    which = (jobs.c.state.in_(WORKING), *where) if where else _late()
    _set(
        connection,
        [*which, jobs.c.attempts >= MAX_ATTEMPTS],
        state=FAILED,
        error=f"the worker ended {MAX_ATTEMPTS} times while it was at this job",
        **_FREED,
    )
    _requeue(connection, which)


def _requeue(
    connection: Connection, where: Sequence[sa.ColumnElement[bool]], **values: Any
) -> None:
    # A proposal stays, with its codes: the next worker goes on from it.
    kept = jobs.c.document.is_not(None)
    for condition, freed in ((kept, {}), (~kept, _NO_CODES)):
        _set(connection, [*where, condition], state=QUEUED, **values, **freed, **_FREED)
