"""Which reserved codes of the last level are free.

A code that any version has used is never given out again, whichever version is current; nor is one
that an unfinished job holds. What a rejected job held is free again.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from service.store.database import head, jobs, versions
from service.store.records import UNFINISHED


def first_free(connection: Connection) -> int:
    """The lowest code above all that are used or held."""
    used = connection.execute(sa.select(sa.func.max(versions.c.code_end))).scalar_one()
    held = connection.execute(
        sa.select(sa.func.max(jobs.c.code_end)).where(jobs.c.state.in_(UNFINISHED))
    ).scalar()
    return max(int(used), int(held or 0))


def left(connection: Connection) -> int:
    """Codes left for items that no job has asked for yet."""
    total = int(connection.execute(sa.select(head.c.codes)).scalar_one())
    waiting = connection.execute(
        sa.select(sa.func.sum(jobs.c.todo)).where(
            jobs.c.state.in_(UNFINISHED), jobs.c.first_code.is_(None)
        )
    ).scalar()
    return max(0, total - first_free(connection) - int(waiting or 0))
