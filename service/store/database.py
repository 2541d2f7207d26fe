"""Tables, connections and transactions of the store."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    event,
)
from sqlalchemy.engine import URL, Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from service.store.errors import DamagedStoreError, StoreError

FORMAT = "gti-store/1"
BUSY_TIMEOUT_S = 10

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_RESTORE = "restore it from a backup, or move it away to begin with the bundle alone"

METADATA = sa.MetaData()

head = Table(
    "head",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),  # one row, 1
    Column("format", String(16), nullable=False),
    Column("bundle_digest", String(64), nullable=False),
    Column("bundle_name", Text, nullable=False),
    Column("codes", Integer, nullable=False),  # of the last level, active and reserved
    Column("current", Integer, nullable=False),
)

versions = Table(
    "versions",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer, ForeignKey("versions.number")),
    Column("kind", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("job_id", String(32)),
    Column("digest", String(64), nullable=False),
    Column("document", Text, nullable=False),
    Column("block", LargeBinary),
    Column("code_end", Integer, nullable=False),  # active codes of the last level
    Column("added", Integer, nullable=False),
    Column("retired", Integer, nullable=False),
    Column("served_at", Float),  # when an engine first served it
    Column("refused", Text),  # why the engine did not take it
)

activations = Table(
    "activations",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("number", Integer, ForeignKey("versions.number"), nullable=False),
    Column("previous", Integer, ForeignKey("versions.number")),
    Column("at", Float, nullable=False),
)

jobs = Table(
    "jobs",
    METADATA,
    Column("seq", Integer, primary_key=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("idempotency_key", String(255), unique=True),
    Column("body_hash", String(64), nullable=False),
    Column("items", Text, nullable=False),  # JSON: those to be onboarded
    Column("todo", Integer, nullable=False),  # how many they are
    Column("known", Text, nullable=False),  # JSON: ids that were there already
    Column("progress", Text),  # JSON: stage, done, of
    Column("result", Text),  # JSON: verdicts, reasons, figures
    Column("error", Text),
    Column("attempts", Integer, nullable=False),
    Column("worker", String(128)),
    Column("lease_until", Float),
    Column("first_code", Integer),  # codes of the last level kept for it: first_code to
    Column("code_end", Integer),  # code_end
    Column("base_version", Integer, ForeignKey("versions.number")),  # of the proposal
    Column("document", Text),
    Column("block", LargeBinary),
    Column("version", Integer, ForeignKey("versions.number")),
)

job_items = Table(
    "job_items",
    METADATA,
    Column("job", Integer, ForeignKey("jobs.seq"), primary_key=True),
    Column("item_id", String(256), primary_key=True, index=True),
    Column("content", String(64), nullable=False),
)

workers = Table(
    "workers",
    METADATA,
    Column("name", String(128), primary_key=True),
    Column("seen_at", Float, nullable=False),
    Column("ready", Boolean, nullable=False),  # takes jobs; else it still loads
)


def store_url(text: str) -> URL:
    """The URL of a store; text without ``://`` is the path of a SQLite file.

    Raises:
        StoreError: no URL that the database library can read.
    """
    if "://" not in text:
        return URL.create("sqlite", database=str(Path(text).absolute()))
    try:
        return sa.make_url(text)
    except ArgumentError as error:
        raise StoreError(f"{text!r} is no database URL, such as sqlite:///gti.db") from error


class Database:
    """Connections to one store. Used from any thread.

    Args:
        url: a URL or the path of a SQLite file.

    Raises:
        StoreError: the URL can't be read, or its driver is not installed.
    """

    def __init__(self, url: str) -> None:
        parsed = store_url(url)
        self._sqlite = parsed.get_backend_name() == "sqlite"
        self.name = parsed.database if self._sqlite else parsed.render_as_string()
        """The store's name in messages, without a password."""
        self.file = _file_of(parsed) if self._sqlite else None
        """The SQLite file; None for other databases, and those in memory."""
        try:
            self._engine = sa.create_engine(
                parsed,
                pool_pre_ping=not self._sqlite,
                connect_args={"timeout": BUSY_TIMEOUT_S} if self._sqlite else {},
            )
        except (ImportError, NoSuchModuleError) as error:
            raise StoreError(f"{self.name}: its database driver is not installed") from error
        if self._sqlite:
            event.listen(self._engine, "connect", _set_up_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one state of the store. Raises StoreError."""
        with self._translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self, *, lock: bool = True) -> Iterator[Connection]:
        """A transaction; writers come one after another, by ``lock`` on PostgreSQL too.

        Raises:
            StoreError: the store can't be read or written.
        """
        with self._translated():
            engine = self._engine.execution_options(gti_write=True)
            with engine.begin() as connection:
                if lock and not self._sqlite:
                    connection.execute(sa.select(head.c.id).with_for_update())
                yield connection

    def prepare(self) -> None:
        """Make the tables where there are none.

        Raises:
            DamagedStoreError: a file that is no database, or a damaged one.
            StoreError: a database that another program wrote.
        """
        if self._sqlite:
            with self.read() as connection:
                verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if verdict != "ok":
                raise DamagedStoreError(f"{self.name} is damaged ({verdict}): {_RESTORE}")
        with self.write(lock=False) as connection:
            names = set(sa.inspect(connection).get_table_names())
            if not {table.name for table in METADATA.sorted_tables} <= names:
                if self._sqlite and names and head.name not in names:
                    raise StoreError(
                        f"{self.name} is a database of another program: choose another"
                    )
                METADATA.create_all(connection)
        if self._sqlite:
            # Kept in the file, so it is set once it is known whose file that is.
            with self._translated(), contextlib.closing(self._engine.raw_connection()) as raw:
                raw.cursor().execute("PRAGMA journal_mode=WAL")

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            if getattr(error.orig, "sqlite_errorcode", None) in _DAMAGED:
                raise DamagedStoreError(f"{self.name}: {error.orig}: {_RESTORE}") from error
            raise StoreError(f"{self.name}: {error.orig}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"{self.name}: {error}") from error


def _file_of(url: URL) -> Path | None:
    name = url.database or ""
    if name in ("", ":memory:") or name.startswith("file:"):
        return None
    return Path(name).absolute()


def now() -> float:
    """Seconds since 1970."""
    return time.time()


def _set_up_sqlite(connection: sa.engine.interfaces.DBAPIConnection, _: object) -> None:
    # The driver's own transactions begin late and as readers; `_begin_sqlite` begins them.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={BUSY_TIMEOUT_S * 1000}",
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("gti_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
