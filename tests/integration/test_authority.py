"""The snapshot of who may do what: how it changes, and what it does while the database is away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from ficc.controller.operations.authority import REFRESH_SECONDS, TOUCH_SECONDS, Authority, digest
from ficc.controller.operations.context import Context
from ficc.controller.store import access, schema
from ficc.controller.store.database import Database, Transaction
from ficc.domain.errors import Refused
from ficc.identifiers import new_id
from ficc.settings import Settings
from support import rows

BEGAN = 2_000_000_000.0


class World:
    """An authority over a database, at a time of our choosing."""

    def __init__(self, db: Database, folder: Path) -> None:
        self.db = db
        self.time = BEGAN
        self.snapshots = 0
        self.authority = Authority(
            Context(Settings(state_directory=folder), db, now=lambda: self.time), self._changed
        )
        self.project_id = self.subject_id = ""

    def _changed(self) -> None:
        self.snapshots += 1

    async def fill(self) -> None:
        def work(tx: Transaction) -> tuple[str, str]:
            access.add_installation(tx, new_id(), BEGAN)
            project_id = rows.project(tx, "one")
            return project_id, rows.member(tx, project_id, "owner", ["models:read", "jobs:read"])

        self.project_id, self.subject_id = await self.db.write(work)

    async def token(self, **others: Any) -> str:
        secret = await self.db.write(lambda tx: rows.token(tx, self.project_id, self.subject_id, **others))
        await self.authority.refresh()
        return secret

    async def session(self, secret: str, expires_at: float) -> None:
        await self.db.write(
            lambda tx: access.add_session(
                tx,
                id=new_id(),
                secret_sha256=digest(secret),
                identity_id=self.subject_id,
                project_id=self.project_id,
                created_at=BEGAN,
                expires_at=expires_at,
            )
        )
        await self.authority.refresh()

    async def last_used(self, secret: str) -> float | None:
        t = schema.tokens.c
        query = select(t.last_used_at).where(t.secret_sha256 == digest(secret))
        return await self.db.read(lambda c: c.scalar(query))

    def refused(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except Refused as refused:
            return refused.code == "unauthenticated"
        return False


@pytest.fixture
async def world(db: Database, tmp_path: Path) -> World:
    made = World(db, tmp_path)
    await made.fill()
    return made


def unavailable(*_: object) -> Any:
    raise Refused("database_unavailable", "away")


async def test_a_credential_is_known_after_a_refresh_and_gone_after_the_next(world: World) -> None:
    secret = await world.token(scopes=["models:read", "models:manage"])
    actor = world.authority.authenticate(secret)
    assert (actor.kind, actor.subject_id, actor.project_id) == ("token", world.subject_id, world.project_id)
    assert actor.scopes == {"models:read"}
    assert world.authority.recheck(actor) == actor
    await world.db.write(lambda tx: access.revoke_tokens(tx, BEGAN, id=actor.authority_id))
    seen = world.snapshots
    await world.authority.refresh()
    assert world.snapshots == seen + 1
    assert world.refused(lambda: world.authority.authenticate(secret))
    assert world.refused(lambda: world.authority.recheck(actor))
    await world.authority.refresh()  # nothing rose
    assert world.snapshots == seen + 1


async def test_a_session_and_a_token_are_not_taken_for_each_other(world: World) -> None:
    token = await world.token()
    await world.session("cookie", BEGAN + 100)
    assert world.authority.authenticate_session("cookie").kind == "session"
    assert world.authority.authenticate(token).kind == "token"
    assert world.refused(lambda: world.authority.authenticate("cookie"))
    assert world.refused(lambda: world.authority.authenticate_session(token))


async def test_a_credential_ends_at_its_time_with_or_without_a_refresh(world: World) -> None:
    secret = await world.token(expires_at=BEGAN + 60)
    await world.session("cookie", BEGAN + 60)
    actor = world.authority.authenticate(secret)
    assert world.authority.expires_at(actor) == BEGAN + 60
    world.time = BEGAN + 60
    for call in (
        lambda: world.authority.authenticate(secret),
        lambda: world.authority.recheck(actor),
        lambda: world.authority.authenticate_session("cookie"),
    ):
        assert world.refused(call)


async def test_while_the_database_is_away_the_last_snapshot_holds_within_each_credentials_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await world.token(expires_at=BEGAN + 60)
    monkeypatch.setattr(world.db, "read", unavailable)
    with pytest.raises(Refused):
        await world.authority.refresh()
    assert world.authority.authenticate(secret)
    world.time = BEGAN + 61
    assert world.refused(lambda: world.authority.authenticate(secret))


async def test_an_older_snapshot_never_replaces_a_newer_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await world.token()
    actor = world.authority.authenticate(secret)
    await world.db.write(access.raise_version)
    read_grants, revoked = asyncio.Event(), asyncio.Event()
    read, reads = world.db.read, 0

    async def slow_first_read(work: Callable[[Connection], Any]) -> Any:
        """The first to read the grants is held up once it has them."""
        nonlocal reads
        reads += 1
        number = reads
        result = await read(work)
        if number == 2:
            read_grants.set()
            await revoked.wait()
        return result

    monkeypatch.setattr(world.db, "read", slow_first_read)
    slow = asyncio.create_task(world.authority.refresh())
    await read_grants.wait()
    await world.db.write(lambda tx: access.revoke_tokens(tx, BEGAN, id=actor.authority_id))
    quick = asyncio.create_task(world.authority.refresh())
    await asyncio.sleep(0.05)
    revoked.set()
    await asyncio.gather(slow, quick)
    assert world.refused(lambda: world.authority.authenticate(secret))


async def test_the_last_use_moves_at_most_once_a_minute(world: World) -> None:
    secret = await world.token()
    for seconds, recorded in (
        (0.0, 0.0),
        (1.0, 0.0),
        (TOUCH_SECONDS - 0.1, 0.0),
        (TOUCH_SECONDS, TOUCH_SECONDS),
    ):
        world.time = BEGAN + seconds
        world.authority.authenticate(secret)
        await world.authority.write_last_used()
        assert await world.last_used(secret) == BEGAN + recorded


async def test_a_last_use_that_could_not_be_written_is_written_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = await world.token()
    world.authority.authenticate(secret)
    monkeypatch.setattr(world.db, "write", unavailable)
    with pytest.raises(Refused):
        await world.authority.write_last_used()
    monkeypatch.undo()
    await world.authority.write_last_used()
    assert await world.last_used(secret) == BEGAN


async def test_what_another_controller_changed_is_known_within_its_time(world: World) -> None:
    running = asyncio.create_task(world.authority.run())
    try:
        elsewhere = Database(world.db.url)
        secret = await elsewhere.write(lambda tx: rows.token(tx, world.project_id, world.subject_id))
        elsewhere.close()
        async with asyncio.timeout(REFRESH_SECONDS * 5):
            while world.refused(lambda: world.authority.authenticate(secret)):
                await asyncio.sleep(0.05)
            seen = world.snapshots
            while world.snapshots == seen:  # live requests are checked against the clock all the same
                await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
