"""Transactions off the event loop.

`read` and `write` run a function on a connection in a thread and return what it returns. A function is one
transaction: it does no network, no disk streaming and no sleep, and it may run on any thread, and more than
once. What it changed it tells the transaction, and listeners hear of it after the commit.

SQLite: one writer, WAL, synchronous FULL, so that what was committed survives a power cut. PostgreSQL: writes
at its default level, so those that follow a read are guarded in the statements themselves or take turns;
reads see one moment. A transaction that lost a race there (a deadlock, a row that another one put in first)
begins again and sees what the other one did.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import QueuePool

from ficc.domain.errors import Refused
from ficc.failpoints import failpoint

T = TypeVar("T")

READERS = 4
POSTGRES_WRITERS = 4
BUSY_SECONDS = 10.0
PING_SECONDS = 5.0
"""How long a sign of life may take."""
READ_SECONDS = 35.0
"""How long any other read may take: longer than PostgreSQL gives one statement."""
POSTGRES_CONNECT_SECONDS = 5
POSTGRES_STATEMENT_SECONDS = 30
POSTGRES_SILENCE_SECONDS = 20
"""After which a connection whose other end acknowledges nothing is given up."""
LOST_RACES_MAX = 5
"""How often one transaction begins again."""
_LOST_RACES = frozenset({"40001", "40P01", "23503", "23505"})
"""SQLSTATE: serialization failure, deadlock, and a key that another transaction took away or put in."""
_SQLITE_OUTAGES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_READONLY,
    }
)

MIGRATIONS = Path(__file__).parent / "migrations"

Change = tuple[str, str]
"""(subject, id), such as ("service", its id)."""


class UnknownSchema(Exception):
    """The database was made or migrated by something else, most likely a later release."""


class Transaction:
    """A connection inside a transaction, and what it changed."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.execute = connection.execute
        self.scalar = connection.scalar
        self.changes: list[Change] = []

    def changed(self, subject: str, subject_id: str) -> None:
        self.changes.append((subject, subject_id))

    def take_turns(self, what: str) -> None:
        """Wait until no other transaction that takes turns at the same is open: what is read after this
        stays true until the commit. To be called before anything is written."""
        if self.connection.dialect.name == "postgresql":  # SQLite has one writer at a time anyway
            self.connection.exec_driver_sql(
                "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"ficc {what}",)
            )


class Database:
    def __init__(self, url: str) -> None:
        self.url = url
        self.is_sqlite = make_url(url).get_backend_name() == "sqlite"
        if self.is_sqlite:
            self._writer = _sqlite_engine(url, 1, writing=True)
            self._reader = _sqlite_engine(url, READERS, writing=False)
        else:
            self._writer = _postgres_engine(url, READERS + POSTGRES_WRITERS)
            self._reader = self._writer.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        self._write_threads = ThreadPoolExecutor(1 if self.is_sqlite else POSTGRES_WRITERS, "database-write")
        self._read_threads = ThreadPoolExecutor(READERS, "database-read")
        self._listeners: list[Callable[[list[Change]], None]] = []

    def on_commit(self, listener: Callable[[list[Change]], None]) -> None:
        """Call `listener` on the event loop after every commit that changed something."""
        self._listeners.append(listener)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """The result of a read-only transaction. Raises Refused `database_unavailable`."""
        return await self._read_within(READ_SECONDS, work)

    async def _read_within(self, seconds: float, work: Callable[[Connection], T]) -> T:
        """A database that has stopped to answer keeps its thread, and nobody else."""

        def run() -> T:
            with _translated(), self._reader.begin() as connection:
                return work(connection)

        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self._read_threads, run)
        except TimeoutError:
            raise _unavailable() from None

    async def write(self, work: Callable[[Transaction], T]) -> T:
        """The result of a transaction, durable when this returns. An exception rolls it back.

        Not cancellable: a caller that is cancelled waits for the verdict of the commit, so that nothing is
        committed behind the back of somebody who believes it was not.
        """
        future = asyncio.get_running_loop().run_in_executor(self._write_threads, self._commit, work)
        future.add_done_callback(self._tell)  # before whoever waits goes on
        result, _ = await to_the_end(future)
        return result

    def _commit(self, work: Callable[[Transaction], T]) -> tuple[T, list[Change]]:
        with _translated():
            for _ in range(LOST_RACES_MAX):
                try:
                    return self._commit_once(work)
                except DBAPIError as error:
                    if getattr(error.orig, "sqlstate", None) not in _LOST_RACES:
                        raise
            return self._commit_once(work)

    def _commit_once(self, work: Callable[[Transaction], T]) -> tuple[T, list[Change]]:
        with self._writer.begin() as connection:
            transaction = Transaction(connection)
            result = work(transaction)
            failpoint("controller.before_commit")
        failpoint("controller.committed")
        return result, transaction.changes

    def _tell(self, future: asyncio.Future[tuple[Any, list[Change]]]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        _, changes = future.result()
        if changes:
            for listener in self._listeners:
                listener(changes)

    async def ping(self) -> None:
        """Raises Refused `database_unavailable` when the database does not answer in time."""
        await self._read_within(
            PING_SECONDS, lambda connection: connection.exec_driver_sql("SELECT 1").scalar()
        )

    def migrate(self, versions: Path | None = None) -> None:
        """Bring the schema to this release's, or to the newest of a directory of revisions. Blocking.

        A failing migration leaves the schema as it was. Raises Refused `database_unavailable`, UnknownSchema.
        """
        config = Config()
        config.set_main_option("script_location", _unexpanded(MIGRATIONS))
        if versions is not None:
            config.set_main_option("path_separator", "os")
            config.set_main_option("version_locations", _unexpanded(versions))
        with _translated(), self._writer.connect() as connection:
            config.attributes["connection"] = connection
            try:
                if self.is_sqlite:
                    _upgrade_sqlite(config, connection)
                else:
                    _upgrade_postgres(config, connection)
            except CommandError as error:
                raise UnknownSchema(
                    f"The database is not one of this release or an earlier one ({error}). Install the release that "
                    "it belongs to, or restore a backup."
                ) from error

    def close(self) -> None:
        self._write_threads.shutdown()
        self._read_threads.shutdown()
        self._writer.dispose()
        self._reader.dispose()


async def to_the_end(work: asyncio.Future[T]) -> T:
    """The result of what must not be left half done: who is cancelled meanwhile waits for its end, and is
    cancelled then."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # looked at: nobody else will
        raise cancelled
    return work.result()


# Migrations.


def _upgrade_sqlite(config: Config, connection: Connection) -> None:
    """SQLite changes a table by making it anew, which must not take along the rows that refer to it: foreign
    keys are looked at once, at the end. Their switch works outside of transactions only."""
    driver: Any = connection.connection.driver_connection
    driver.execute("PRAGMA foreign_keys = OFF")
    try:
        with connection.begin():
            command.upgrade(config, "head")
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
            if broken:
                raise RuntimeError(f"the migration leaves rows that refer to nothing: {broken[:5]}")
    finally:
        driver.execute("PRAGMA foreign_keys = ON")


def _upgrade_postgres(config: Config, connection: Connection) -> None:
    """One controller migrates; others that start at the same moment find it done."""
    with connection.begin():
        connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
        Transaction(connection).take_turns("migrations")
        command.upgrade(config, "head")


def _unexpanded(path: Path) -> str:
    return str(path).replace("%", "%%")  # configparser's


# Engines.


def _postgres_engine(url: str, size: int) -> Engine:
    """What the URL itself says goes first."""
    given: Mapping[str, Any] = make_url(url).query
    arguments = {
        "connect_timeout": str(POSTGRES_CONNECT_SECONDS),
        "tcp_user_timeout": str(POSTGRES_SILENCE_SECONDS * 1000),
        "keepalives_idle": str(POSTGRES_SILENCE_SECONDS),
    }
    options = f"-c statement_timeout={POSTGRES_STATEMENT_SECONDS * 1000} {given.get('options', '')}".strip()
    arguments = {name: value for name, value in arguments.items() if name not in given}
    return create_engine(
        url,
        pool_pre_ping=True,
        pool_size=size,
        max_overflow=0,
        pool_timeout=POSTGRES_STATEMENT_SECONDS,
        connect_args={**arguments, "options": options},
    )


def _sqlite_engine(url: str, size: int, *, writing: bool) -> Engine:
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=size,
        max_overflow=0,
        connect_args={"check_same_thread": False, "timeout": BUSY_SECONDS},
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: object) -> None:
        # The driver's own transaction handling is off: it begins late and commits before DDL.
        connection.isolation_level = None
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")
        if not writing:
            connection.execute("PRAGMA query_only = ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")

    return engine


# Faults.


class _translated:  # noqa: N801  # reads as a statement
    """Database faults as refusals that a caller can be told."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and _is_outage(error):
            raise _unavailable() from error


def _is_outage(error: BaseException) -> bool:
    """Whether the database is at fault, rather than what it was asked."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, PoolTimeoutError)
    if isinstance(error.orig, sqlite3.Error):
        return getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF in _SQLITE_OUTAGES
    if error.statement is None and not isinstance(error, IntegrityError):
        return True  # it was not asked anything yet: connecting, or the look at an old connection, failed
    return isinstance(error, (OperationalError, InterfaceError)) or error.connection_invalidated


def _unavailable() -> Refused:
    return Refused(
        "database_unavailable",
        "The database does not answer. Try again shortly; a change whose answer was lost may have been made, so "
        "read first.",
        retry_after_seconds=1,
    )
