"""The database on both backends: its schema, what a transaction promises, and what happens without it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, insert, select, update
from sqlalchemy.exc import IntegrityError, ProgrammingError

from ficc.client.errors import ApiError
from ficc.controller.store import access, database, schema
from ficc.controller.store.database import Database, Transaction
from ficc.domain import service
from ficc.domain.errors import Refused
from support import rows
from support.installation import Installation
from support.postgres import Postgres

PATIENCE_SECONDS = 20.0


def add_project(name: str) -> Callable[[Transaction], str]:
    def work(tx: Transaction) -> str:
        project_id = rows.project(tx, name)
        tx.changed("project", project_id)
        return project_id

    return work


def names(connection: Connection) -> set[str]:
    return set(connection.scalars(select(schema.projects.c.name)))


def names_seen_by_others(db: Database) -> set[str]:
    """What a connection that has nothing to do with ours sees."""
    engine = create_engine(db.url)
    try:
        with engine.connect() as connection:
            return names(connection)
    finally:
        engine.dispose()


# The schema.


def test_the_migrations_make_exactly_the_tables_of_the_code(db: Database) -> None:
    engine = create_engine(db.url)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        differences = compare_metadata(context, schema.metadata)
    engine.dispose()
    assert differences == []


async def test_migrating_again_changes_nothing(db: Database) -> None:
    await db.write(add_project("kept"))
    before = rows.schema_of(db.url), rows.everything(db.url)
    db.migrate()
    assert (rows.schema_of(db.url), rows.everything(db.url)) == before


def test_controllers_that_start_at_the_same_moment_migrate_once(database_url: str) -> None:
    found = [Database(database_url) for _ in range(4)]
    faults: list[BaseException] = []

    def migrate(one: Database) -> None:
        try:
            one.migrate()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=migrate, args=(one,)) for one in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    for one in found:
        one.close()
    assert not faults
    assert "services" in rows.schema_of(database_url)


# L16: an upgrade with services in every state.

BROKEN = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "{head}"
branch_labels = depends_on = None


def upgrade():
    op.add_column("services", sa.Column("colour", sa.String(8)))
    op.create_table("colours", sa.Column("id", sa.String(8), primary_key=True))
    op.execute("UPDATE services SET colour = 'red'")
    op.execute("INSERT INTO nowhere VALUES (1)")
"""
REBUILDING = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "{head}"
branch_labels = depends_on = None


def upgrade():
    with op.batch_alter_table("models", recreate="auto") as batch:
        batch.alter_column("name", type_=sa.String(300), existing_nullable=False)
"""
ORPHANING = """
from alembic import op

revision, down_revision = "9999", "{head}"
branch_labels = depends_on = None


def upgrade():
    op.execute("DELETE FROM models")
"""


def with_a_further_revision(folder: Path, text: str) -> Path:
    """Our revisions and one more on top."""
    versions = folder / "versions with 100% of them"
    shutil.copytree(database.MIGRATIONS / "versions", versions)
    head = max(path.name[:4] for path in versions.glob("[0-9]*.py"))
    (versions / "9999_one_more.py").write_text(text.replace("{head}", head))
    return versions


async def fill(db: Database) -> None:
    """A service in every state, with an attempt that holds a reservation."""

    def work(tx: Transaction) -> None:
        project_id = rows.project(tx, "p")
        model = rows.model(tx, project_id, b"weights")
        rows.node(tx)
        for state in service.State:
            row = rows.service_row(tx, project_id, model.id, state.value, state)
            rows.attempt(tx, row)

    await db.write(work)


async def test_a_failing_migration_leaves_the_old_schema_and_every_row(db: Database, tmp_path: Path) -> None:
    """L16, where the upgrade fails: on both databases, with a service in every state."""
    await fill(db)
    before = rows.schema_of(db.url), rows.everything(db.url)
    with pytest.raises(Exception, match="nowhere"):
        db.migrate(with_a_further_revision(tmp_path, BROKEN))
    assert (rows.schema_of(db.url), rows.everything(db.url)) == before
    db.migrate()  # the release before goes on
    await db.write(add_project("after"))
    assert "after" in await db.read(names)


async def test_a_database_of_a_later_release_is_left_alone(db: Database, tmp_path: Path) -> None:
    await fill(db)
    db.migrate(with_a_further_revision(tmp_path, REBUILDING))
    before = rows.schema_of(db.url), rows.everything(db.url)
    with pytest.raises(database.UnknownSchema, match="9999"):
        db.migrate()
    assert (rows.schema_of(db.url), rows.everything(db.url)) == before


async def test_a_migration_keeps_services_while_it_makes_a_table_anew_that_they_refer_to(
    db: Database, tmp_path: Path
) -> None:
    """L16, where the upgrade works: on both databases, with a service in every state."""
    await fill(db)
    before = rows.everything(db.url)
    db.migrate(with_a_further_revision(tmp_path, REBUILDING))
    after = rows.everything(db.url)
    assert after.pop("alembic_version") == [("9999",)]
    assert after == {name: found for name, found in before.items() if name != "alembic_version"}
    with pytest.raises(IntegrityError):  # keys are kept again
        await db.write(lambda tx: rows.service_row(tx, "0" * 26, "0" * 26, "orphan"))


async def test_a_migration_that_leaves_rows_referring_to_nothing_is_undone(
    db: Database, tmp_path: Path
) -> None:
    await fill(db)
    before = rows.everything(db.url)
    with pytest.raises(Exception, match="refer"):
        db.migrate(with_a_further_revision(tmp_path, ORPHANING))
    assert rows.everything(db.url) == before


# What a transaction promises.


async def test_sqlite_keeps_what_was_committed_through_a_power_cut(tmp_path: Path) -> None:
    db = Database(f"sqlite:///{tmp_path / 'one.sqlite'}")
    db.migrate()

    def pragmas(connection: Connection) -> dict[str, Any]:
        asked = ("journal_mode", "synchronous", "foreign_keys")
        return {name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in asked}

    try:
        expected = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}  # 2 is FULL
        assert await db.write(lambda tx: pragmas(tx.connection)) == expected
        assert (await db.read(pragmas))["journal_mode"] == "wal"
    finally:
        db.close()


async def test_a_row_that_refers_to_nothing_is_refused(db: Database) -> None:
    with pytest.raises(IntegrityError):
        await db.write(lambda tx: access.set_membership(tx, "0" * 26, "0" * 26, []))


async def test_a_write_is_there_for_others_once_it_returns(db: Database) -> None:
    project_id = await db.write(add_project("done"))
    assert await db.read(lambda c: access.project_name(c, project_id)) == "done"
    assert names_seen_by_others(db) == {"done"}


async def test_an_exception_undoes_all_of_a_write(db: Database) -> None:
    def work(tx: Transaction) -> None:
        add_project("undone")(tx)
        raise Refused("not_found", "on second thoughts")

    with pytest.raises(Refused, match="second thoughts"):
        await db.write(work)
    assert names_seen_by_others(db) == set()


async def test_a_read_changes_nothing(db: Database) -> None:
    with pytest.raises(Exception, match=r"read-?only|database_unavailable"):
        await db.read(
            lambda c: c.execute(insert(schema.projects).values(id="0" * 26, name="x", created_at=0.0))
        )
    assert await db.read(names) == set()


async def test_a_read_sees_one_moment(db: Database) -> None:
    first_read, wrote = threading.Event(), threading.Event()

    def work(connection: Connection) -> tuple[set[str], set[str]]:
        before = names(connection)
        first_read.set()
        assert wrote.wait(PATIENCE_SECONDS)
        return before, names(connection)

    reading = asyncio.create_task(db.read(work))
    assert await asyncio.to_thread(first_read.wait, PATIENCE_SECONDS)
    await db.write(add_project("meanwhile"))
    wrote.set()
    assert await reading == (set(), set())


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_who_is_cancelled_waits_for_the_verdict_of_the_commit(db: Database, cancellations: int) -> None:
    begun, go = threading.Event(), threading.Event()
    heard: list[list[database.Change]] = []
    db.on_commit(heard.append)

    def work(tx: Transaction) -> None:
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        add_project("committed")(tx)

    writing = asyncio.create_task(db.write(work))
    assert await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
    for _ in range(cancellations):
        writing.cancel()
        await asyncio.sleep(0.02)
        assert not writing.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert names_seen_by_others(db) == {"committed"}
    assert [[subject for subject, _ in changes] for changes in heard] == [["project"]]


async def test_who_is_cancelled_is_cancelled_also_when_the_write_fails(db: Database) -> None:
    begun, go = threading.Event(), threading.Event()

    def work(tx: Transaction) -> None:
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        raise Refused("not_found", "no")

    writing = asyncio.create_task(db.write(work))
    assert await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
    writing.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):  # a loop that goes on after refusals has to end
        await writing


async def test_listeners_hear_of_what_is_committed_and_of_nothing_else(db: Database) -> None:
    heard: list[tuple[str, bool]] = []

    def listen(changes: list[database.Change]) -> None:
        seen = names_seen_by_others(db)
        heard.extend((subject, "told" in seen) for subject, _ in changes)

    db.on_commit(listen)

    def undone(tx: Transaction) -> None:
        add_project("untold")(tx)
        raise Refused("not_found", "no")

    with pytest.raises(Refused):
        await db.write(undone)
    await db.write(lambda tx: None)
    await db.write(add_project("told"))
    assert heard == [("project", True)]


# Races, which only PostgreSQL has: SQLite has one writer at a time.


async def test_a_transaction_that_lost_a_race_begins_again(postgres_db: Database) -> None:
    both_looked = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    tries: list[int] = []

    def work(tx: Transaction) -> str:
        tries.append(1)
        if "wanted" in names(tx.connection):
            return "found"
        if len(tries) <= 2:
            both_looked.wait()
        rows.project(tx, "wanted")
        return "made"

    results = await asyncio.gather(postgres_db.write(work), postgres_db.write(work))
    assert sorted(results) == ["found", "made"]
    assert len(tries) == 3


async def test_a_deadlock_is_no_fault_of_the_caller(postgres_db: Database) -> None:
    one, other = [await postgres_db.write(add_project(name)) for name in ("one", "other")]
    both_hold = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    tries: list[int] = []

    def rename(*ids: str) -> Callable[[Transaction], None]:
        def work(tx: Transaction) -> None:
            tries.append(1)
            for number, project_id in enumerate(ids):
                table = schema.projects
                tx.execute(update(table).where(table.c.id == project_id).values(created_at=float(number)))
                if number == 0 and len(tries) <= 2:
                    both_hold.wait()

        return work

    await asyncio.gather(postgres_db.write(rename(one, other)), postgres_db.write(rename(other, one)))
    assert len(tries) == 3


async def test_a_fault_that_is_no_race_is_raised_in_the_end(postgres_db: Database) -> None:
    tries: list[int] = []

    def work(tx: Transaction) -> None:
        tries.append(1)
        access.set_membership(tx, "0" * 26, "0" * 26, [])

    with pytest.raises(IntegrityError):
        await postgres_db.write(work)
    assert len(tries) == database.LOST_RACES_MAX + 1


async def test_who_takes_turns_sees_what_the_one_before_committed(db: Database) -> None:
    counted: list[int] = []

    def work(tx: Transaction) -> None:
        tx.take_turns("counting")
        count = len(names(tx.connection))
        counted.append(count)
        time.sleep(0.01)
        rows.project(tx, f"project {count}")

    await asyncio.gather(*(db.write(work) for _ in range(8)))
    assert sorted(counted) == list(range(8))


# Without a database (G30).


async def test_a_stopped_database_is_said_to_be_unavailable_and_is_used_again_once_it_is_back(
    postgres: Postgres, postgres_db: Database
) -> None:
    await asyncio.gather(*(postgres_db.ping() for _ in range(8)))  # connections in the pool to be lost
    postgres.stop()
    try:
        for call in (postgres_db.ping(), postgres_db.read(names), postgres_db.write(add_project("lost"))):
            with pytest.raises(Refused) as refused:
                await call
            assert refused.value.code == "database_unavailable"
            assert refused.value.retry_after_seconds
    finally:
        postgres.start()
    await postgres_db.write(add_project("kept"))
    assert await postgres_db.read(names) == {"kept"}


async def test_a_connection_that_cannot_be_had_for_whatever_reason_is_the_databases_fault(
    postgres_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise psycopg.ProgrammingError(
            "can't change 'autocommit' now: connection in transaction status UNKNOWN"
        )

    monkeypatch.setattr(psycopg, "connect", connect)
    for call in (postgres_db.ping(), postgres_db.write(add_project("lost"))):
        with pytest.raises(Refused) as refused:
            await call
        assert refused.value.code == "database_unavailable"
    monkeypatch.undo()
    with pytest.raises(ProgrammingError):  # what is wrong with a question is ours
        await postgres_db.read(lambda c: c.exec_driver_sql("SELECT FROM nowhere WHERE"))


async def test_a_database_that_hangs_does_not_hang_who_reads(
    postgres: Postgres, postgres_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PING_SECONDS", 0.3)
    monkeypatch.setattr(database, "READ_SECONDS", 0.3)
    await postgres_db.ping()
    processes = postgres.processes()
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        for call in (postgres_db.ping(), postgres_db.read(names)):
            with pytest.raises(Refused) as refused:
                await call
            assert refused.value.code == "database_unavailable"
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    await postgres_db.ping()


def test_management_answers_503_without_its_database_and_never_401(
    postgres: Postgres, tmp_path: Path
) -> None:
    url = postgres.create()
    made = Installation(tmp_path, settings={"FICC_DATABASE_URL": url})
    try:
        made.start("controller")
        model = made.call("POST", "/models", rows.manifest_of(b"weights"))
        postgres.stop()
        try:
            for pause in (2.5, 0.0):  # also past the snapshot's refresh
                for method, path, body in (
                    ("GET", "/health", None),
                    ("GET", "/models", None),
                    ("GET", f"/models/{model['id']}", None),
                    ("POST", "/models", rows.manifest_of(b"others")),
                    ("POST", f"/models/{model['id']}/files/0", {"offset": 0, "data": "d2VpZ2h0cw=="}),
                    ("DELETE", f"/models/{model['id']}", None),
                    ("POST", "/session/codes", None),
                ):
                    with pytest.raises(ApiError) as refused:
                        made.call(method, path, body)
                    assert (refused.value.status, refused.value.code) == (503, "database_unavailable"), path
                time.sleep(pause)
            with pytest.raises(ApiError) as unknown:
                asyncio.run(_call_with(made, "ficc_unknown"))
            assert unknown.value.code == "unauthenticated"
        finally:
            postgres.start()
        assert "Traceback" not in made.logs["controller"].read_text()
        assert made.call("GET", "/health")["status"] == "ok"
        assert made.call("GET", "/models")["items"] == [model], made.logs["controller"].read_text()
        piece = {"offset": 0, "data": "d2VpZ2h0cw=="}
        assert made.call("POST", f"/models/{model['id']}/files/0", piece)["state"] == "verified"
        assert "Traceback" not in made.logs["controller"].read_text()
        postgres.stop()
        try:
            time.sleep(1.5)  # the background work has noticed
            made.kill("controller", signal.SIGTERM)  # and ends all the same
        finally:
            postgres.start()
    finally:
        made.stop()
        postgres.drop(url)


async def _call_with(made: Installation, token: str) -> Any:
    async with made.api(token) as api:
        return await api.call("GET", "/models")
