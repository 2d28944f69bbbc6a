"""Identities, projects, memberships, tokens and sessions, as rows.

Every change of who may do what raises the installation's authority version in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, insert, select, update

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain.access import Kind


@dataclass(frozen=True, slots=True)
class Grant:
    """What one credential gives, its subject's membership already joined. `expires_at` is None for ever."""

    kind: Kind
    authority_id: str
    secret_sha256: str
    subject_id: str
    project_id: str
    service_id: str | None
    granted: tuple[str, ...]
    membership: tuple[str, ...]
    expires_at: float | None
    limits: Mapping[str, int] | None = None
    """Of a token: those that are not the installation's defaults."""


def raise_version(tx: Transaction) -> None:
    tx.execute(
        update(schema.installation).values(authority_version=schema.installation.c.authority_version + 1)
    )
    tx.changed("authority", "")


def version(connection: Connection) -> int:
    return int(connection.scalar(select(schema.installation.c.authority_version)) or 0)


def grants(connection: Connection, now: float) -> list[Grant]:
    """Every credential that holds now."""
    return [*_token_grants(connection, now), *_session_grants(connection, now)]


def _token_grants(connection: Connection, now: float) -> Iterable[Grant]:
    t, m, i = schema.tokens.c, schema.memberships.c, schema.identities.c
    rows = connection.execute(
        select(
            *(t.id, t.secret_sha256, t.subject_id, t.project_id, t.service_id, t.scopes, t.expires_at),
            *(m.scopes, t.limits),
        )
        .select_from(schema.tokens)
        .join(schema.memberships, and_(m.project_id == t.project_id, m.identity_id == t.subject_id))
        .join(schema.identities, i.id == t.subject_id)
        .where(
            t.revoked_at.is_(None), i.disabled_at.is_(None), (t.expires_at.is_(None)) | (t.expires_at > now)
        )
    )
    for token_id, secret, subject, project, service, granted, expires_at, membership, limits in rows:
        kind: Kind = "token" if service is None else "service_token"
        yield Grant(
            kind,
            token_id,
            secret,
            subject,
            project,
            service,
            tuple(granted),
            tuple(membership),
            expires_at,
            limits,
        )


def _session_grants(connection: Connection, now: float) -> Iterable[Grant]:
    s, m, i = schema.sessions.c, schema.memberships.c, schema.identities.c
    rows = connection.execute(
        select(s.id, s.secret_sha256, s.identity_id, s.project_id, s.expires_at, m.scopes)
        .select_from(schema.sessions)
        .join(schema.memberships, and_(m.project_id == s.project_id, m.identity_id == s.identity_id))
        .join(schema.identities, i.id == s.identity_id)
        .where(s.ended_at.is_(None), i.disabled_at.is_(None), s.expires_at > now)
    )
    for session_id, secret, subject, project, expires_at, membership in rows:
        scopes = tuple(membership)
        yield Grant("session", session_id, secret, subject, project, None, scopes, scopes, expires_at)


# Rows.


def add_identity(tx: Transaction, identity_id: str, name: str, now: float) -> None:
    tx.execute(insert(schema.identities).values(id=identity_id, name=name, created_at=now))


def add_project(tx: Transaction, project_id: str, name: str, now: float) -> None:
    tx.execute(insert(schema.projects).values(id=project_id, name=name, created_at=now))


def set_membership(tx: Transaction, project_id: str, identity_id: str, scopes: Sequence[str]) -> None:
    m = schema.memberships.c
    changed = tx.execute(
        update(schema.memberships)
        .where(m.project_id == project_id, m.identity_id == identity_id)
        .values(scopes=list(scopes))
    )
    if not changed.rowcount:
        tx.execute(
            insert(schema.memberships).values(
                project_id=project_id, identity_id=identity_id, scopes=list(scopes)
            )
        )
    raise_version(tx)


def add_token(tx: Transaction, **columns: Any) -> None:
    tx.execute(insert(schema.tokens).values(**columns))
    raise_version(tx)


def revoke_tokens(tx: Transaction, now: float, **where: Any) -> int:
    """Revoke the tokens whose columns have these values and that are not revoked; how many."""
    condition = and_(
        schema.tokens.c.revoked_at.is_(None), *(schema.tokens.c[k] == v for k, v in where.items())
    )
    count = tx.execute(update(schema.tokens).where(condition).values(revoked_at=now)).rowcount
    if count:
        raise_version(tx)
    return count


def tokens(connection: Connection, project_id: str, after: str | None, limit: int) -> Sequence[Row[Any]]:
    """Tokens of a project that were not revoked, newest first, one more than `limit` if there are more."""
    t = schema.tokens.c
    query = select(schema.tokens).where(t.project_id == project_id, t.revoked_at.is_(None))
    if after is not None:
        query = query.where(t.id < after)
    return connection.execute(query.order_by(t.id.desc()).limit(limit + 1)).all()


def touch_tokens(tx: Transaction, used_at: Mapping[str, float]) -> None:
    """When each of these tokens was last used; no change of authority."""
    for token_id, at in used_at.items():
        tx.execute(update(schema.tokens).where(schema.tokens.c.id == token_id).values(last_used_at=at))


def membership_scopes(connection: Connection, project_id: str, identity_id: str) -> tuple[str, ...]:
    m = schema.memberships.c
    scopes = connection.scalar(
        select(m.scopes).where(m.project_id == project_id, m.identity_id == identity_id)
    )
    return tuple(scopes or ())


def projects_of(connection: Connection, identity_id: str) -> Sequence[Any]:
    p, m = schema.projects.c, schema.memberships.c
    return connection.execute(
        select(p.id, p.name, m.scopes, p.created_at)
        .select_from(schema.projects)
        .join(schema.memberships, m.project_id == p.id)
        .where(m.identity_id == identity_id)
        .order_by(p.id.desc())
    ).all()


def identity_name(connection: Connection, identity_id: str) -> str | None:
    return connection.scalar(select(schema.identities.c.name).where(schema.identities.c.id == identity_id))


def project_name(connection: Connection, project_id: str) -> str | None:
    return connection.scalar(select(schema.projects.c.name).where(schema.projects.c.id == project_id))


# Signing in.


def add_code(tx: Transaction, **columns: Any) -> None:
    tx.execute(insert(schema.sign_in_codes).values(**columns))


def purge_codes(tx: Transaction, now: float) -> None:
    """Codes that nobody can use any more."""
    c = schema.sign_in_codes.c
    tx.execute(delete(schema.sign_in_codes).where(c.used_at.is_not(None) | (c.expires_at <= now)))


def use_code(tx: Transaction, code_sha256: str, now: float) -> Row[Any] | None:
    """The code's row, used up by this very call; None for one that is unknown, used or expired."""
    c = schema.sign_in_codes.c
    used = tx.execute(
        update(schema.sign_in_codes)
        .where(c.code_sha256 == code_sha256, c.used_at.is_(None), c.expires_at > now)
        .values(used_at=now)
    )
    if used.rowcount != 1:
        return None
    return tx.execute(select(schema.sign_in_codes).where(c.code_sha256 == code_sha256)).one()


def add_session(tx: Transaction, **columns: Any) -> None:
    tx.execute(insert(schema.sessions).values(**columns))
    raise_version(tx)


def purge_sessions(tx: Transaction, now: float) -> None:
    """Sessions that ended, by themselves or otherwise."""
    s = schema.sessions.c
    tx.execute(delete(schema.sessions).where(s.ended_at.is_not(None) | (s.expires_at <= now)))


def end_session(tx: Transaction, session_id: str, now: float) -> None:
    s = schema.sessions.c
    tx.execute(update(schema.sessions).where(s.id == session_id, s.ended_at.is_(None)).values(ended_at=now))
    raise_version(tx)


# The installation itself.


def installation_id(connection: Connection) -> str | None:
    return connection.scalar(select(schema.installation.c.id))


def add_installation(tx: Transaction, installation_id: str, now: float) -> None:
    tx.execute(insert(schema.installation).values(id=installation_id, created_at=now, authority_version=1))


def named_owner(connection: Connection, identity: str, project: str) -> tuple[str, str]:
    """The ids of the identity and the project of these names."""
    owner = connection.scalar(select(schema.identities.c.id).where(schema.identities.c.name == identity))
    found = connection.scalar(select(schema.projects.c.id).where(schema.projects.c.name == project))
    return str(owner), str(found)
