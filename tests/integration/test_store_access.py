"""Credentials as rows: used once, held while they hold, and every change of authority counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from ficc.controller.store import access, schema
from ficc.controller.store.database import Database, Transaction
from ficc.identifiers import new_id
from support import rows

NOW = 1_000_000.0


@pytest.fixture
async def owner(db: Database) -> tuple[str, str]:
    """A project and an identity with some scopes in it."""

    def work(tx: Transaction) -> tuple[str, str]:
        access.add_installation(tx, new_id(), NOW)
        project_id = rows.project(tx, "one")
        return project_id, rows.member(tx, project_id, "owner", ["models:read", "models:manage"])

    return await db.write(work)


def code(owner: tuple[str, str], name: str, expires_at: float) -> Callable[[Transaction], None]:
    project_id, identity_id = owner
    return lambda tx: access.add_code(
        tx, code_sha256=name, identity_id=identity_id, project_id=project_id, expires_at=expires_at
    )


def session(owner: tuple[str, str], secret: str, expires_at: float) -> Callable[[Transaction], None]:
    project_id, identity_id = owner
    return lambda tx: access.add_session(
        tx,
        id=new_id(),
        secret_sha256=secret,
        identity_id=identity_id,
        project_id=project_id,
        created_at=NOW,
        expires_at=expires_at,
    )


async def test_a_sign_in_code_is_used_once_however_many_try(db: Database, owner: tuple[str, str]) -> None:
    await db.write(code(owner, "code", NOW + 10))
    used = await asyncio.gather(*(db.write(lambda tx: access.use_code(tx, "code", NOW)) for _ in range(8)))
    assert [row.identity_id for row in used if row is not None] == [owner[1]]


async def test_a_code_that_is_unknown_or_expired_is_no_code(db: Database, owner: tuple[str, str]) -> None:
    await db.write(code(owner, "code", NOW + 10))
    assert await db.write(lambda tx: access.use_code(tx, "code", NOW + 10)) is None
    assert await db.write(lambda tx: access.use_code(tx, "guess", NOW)) is None
    assert await db.write(lambda tx: access.use_code(tx, "code", NOW + 9)) is not None


async def test_what_nobody_can_use_any_more_is_cleared_away(db: Database, owner: tuple[str, str]) -> None:
    for name, expires_at in (("good", NOW + 10), ("old", NOW), ("used", NOW + 10)):
        await db.write(code(owner, name, expires_at))
        await db.write(session(owner, name, expires_at))
    assert await db.write(lambda tx: access.use_code(tx, "used", NOW - 1)) is not None
    ended = select(schema.sessions.c.id).where(schema.sessions.c.secret_sha256 == "used")
    session_id = await db.read(lambda c: c.scalar(ended))
    await db.write(lambda tx: access.end_session(tx, str(session_id), NOW))
    await db.write(lambda tx: access.purge_codes(tx, NOW))
    await db.write(lambda tx: access.purge_sessions(tx, NOW))
    assert await db.read(lambda c: c.scalars(select(schema.sign_in_codes.c.code_sha256)).all()) == ["good"]
    assert await db.read(lambda c: c.scalars(select(schema.sessions.c.secret_sha256)).all()) == ["good"]


async def test_a_grant_holds_what_was_granted_beside_what_its_subject_has(
    db: Database, owner: tuple[str, str]
) -> None:
    project_id, identity_id = owner
    await db.write(lambda tx: rows.token(tx, project_id, identity_id, ["models:read", "jobs:read"]))
    await db.write(session(owner, "secret", NOW + 10))
    token, held = await db.read(lambda c: access.grants(c, NOW))
    assert (token.kind, set(token.granted), set(token.membership)) == (
        "token",
        {"models:read", "jobs:read"},
        {"models:read", "models:manage"},
    )
    assert (held.kind, set(held.granted)) == ("session", {"models:read", "models:manage"})


async def test_a_credential_that_does_not_hold_is_no_grant(db: Database, owner: tuple[str, str]) -> None:
    project_id, identity_id = owner
    stranger = await db.write(lambda tx: rows.member(tx, project_id, "stranger"))
    elsewhere = await db.write(lambda tx: rows.project(tx, "other"))

    def fill(tx: Transaction) -> None:
        rows.token(tx, project_id, identity_id, expires_at=NOW)  # over
        rows.token(tx, elsewhere, identity_id)  # its subject is no member there
        rows.token(tx, project_id, stranger)  # disabled below
        tx.execute(
            update(schema.identities).where(schema.identities.c.id == stranger).values(disabled_at=NOW)
        )
        rows.token(tx, project_id, identity_id, service_id=new_id())
        access.revoke_tokens(tx, NOW, subject_id=identity_id, project_id=project_id, expires_at=None)
        rows.token(tx, project_id, identity_id, expires_at=NOW + 1)

    await db.write(fill)
    await db.write(session(owner, "over", NOW))
    assert [grant.expires_at for grant in await db.read(lambda c: access.grants(c, NOW))] == [NOW + 1]


def version(connection: Connection) -> int:
    return access.version(connection)


async def test_every_change_of_who_may_do_what_is_counted_and_told(
    db: Database, owner: tuple[str, str]
) -> None:
    project_id, identity_id = owner
    told: list[Any] = []
    db.on_commit(lambda changes: told.extend(subject for subject, _ in changes))
    changes: list[Callable[[Transaction], Any]] = [
        lambda tx: access.set_membership(tx, project_id, identity_id, ["models:read"]),
        lambda tx: rows.token(tx, project_id, identity_id),
        session(owner, "secret", NOW + 10),
        lambda tx: access.revoke_tokens(tx, NOW, project_id=project_id),
    ]
    for change in changes:
        before = await db.read(version)
        told.clear()
        await db.write(change)
        assert await db.read(version) == before + 1
        assert "authority" in told
    before = await db.read(version)
    assert await db.write(lambda tx: access.revoke_tokens(tx, NOW, project_id=project_id)) == 0
    await db.write(lambda tx: access.touch_tokens(tx, {"nobody": NOW}))
    assert await db.read(version) == before


async def test_the_version_counts_every_one_of_many_changes_at_once(
    db: Database, owner: tuple[str, str]
) -> None:
    before = await db.read(version)
    await asyncio.gather(*(db.write(lambda tx: rows.token(tx, *owner)) for _ in range(8)))
    assert await db.read(version) == before + 8


async def test_pages_of_tokens_leave_out_the_revoked_and_other_projects(
    db: Database, owner: tuple[str, str]
) -> None:
    project_id, identity_id = owner
    elsewhere = await db.write(lambda tx: rows.project(tx, "other"))
    for _ in range(5):
        await db.write(lambda tx: rows.token(tx, project_id, identity_id))
    await db.write(lambda tx: rows.token(tx, elsewhere, identity_id))
    found = await db.read(lambda c: access.tokens(c, project_id, None, 10))
    ids = [row.id for row in found]
    assert len(ids) == 5
    assert ids == sorted(ids, reverse=True)
    assert await db.write(lambda tx: access.revoke_tokens(tx, NOW, id=ids[1], project_id=elsewhere)) == 0
    assert await db.write(lambda tx: access.revoke_tokens(tx, NOW, id=ids[1], project_id=project_id)) == 1
    page = await db.read(lambda c: access.tokens(c, project_id, ids[0], 2))
    assert [row.id for row in page] == [ids[2], ids[3], ids[4]]  # one more than asked for: there is more
