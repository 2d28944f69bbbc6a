"""Signing in and out, tokens, and what is made at the very first start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ficc.controller.operations.authority import Authority, digest
from ficc.controller.operations.context import Context, Page, not_found, page_of
from ficc.controller.store import access as rows
from ficc.controller.store.database import Transaction
from ficc.domain.access import SCOPES, Actor, check_scopes
from ficc.domain.errors import Refused, invalid
from ficc.protocol.http_api import rfc3339

OWNER = "owner"
PROJECT = "default"
CODE_SECONDS = 600
SESSION_SECONDS = 12 * 3600
TOKEN_SECONDS_MIN = 60
TOKEN_SECONDS_MAX = 10 * 365 * 86_400
TOKEN_PREFIX = "ficc_"  # noqa: S105  # how every token begins, so that scanners recognise one
PREFIX_SHOWN = 12


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A fresh session: the cookie's secret, and what the browser is told."""

    secret: str
    csrf: str
    actor: Actor


@dataclass(frozen=True, slots=True)
class FirstStart:
    """What a start made or found: the installation, and the owner's token, if one was asked for."""

    installation_id: str
    token: str | None


def csrf_token(session_secret: str) -> str:
    """The token that a browser sends with every mutation, from the secret that scripts cannot read."""
    return hashlib.sha256(f"csrf:{session_secret}".encode()).hexdigest()


class Access:
    def __init__(self, context: Context, authority: Authority) -> None:
        self._context = context
        self._authority = authority

    async def refresh(self) -> None:
        """Let what was just committed hold in this process too."""
        await self._authority.refresh()

    # The first start.

    async def first_start(self, *, token_label: str | None) -> FirstStart:
        """Make the installation with its owner and project, once. With a label, also a token for the owner
        with every scope: the command line's on this machine."""
        context = self._context
        now = context.now()
        installation, identity, project = (context.new_id() for _ in range(3))
        secret = TOKEN_PREFIX + context.new_secret()

        def work(tx: Transaction) -> FirstStart:
            tx.take_turns("first start")
            if rows.installation_id(tx.connection) is None:
                rows.add_installation(tx, installation, now)
                rows.add_identity(tx, identity, OWNER, now)
                rows.add_project(tx, project, PROJECT, now)
                rows.set_membership(tx, project, identity, SCOPES)
            owner, found = rows.named_owner(tx.connection, OWNER, PROJECT)
            if token_label is not None:
                self._insert_token(tx, secret, owner, found, token_label, SCOPES, None, None)
            known = rows.installation_id(tx.connection)
            assert known is not None
            return FirstStart(known, secret if token_label is not None else None)

        return await context.database.write(work)

    # Signing in.

    async def new_code(self, identity_id: str, project_id: str) -> str:
        """A one-use sign-in code, good for ten minutes."""
        code, now = self._context.new_secret(), self._context.now()

        def work(tx: Transaction) -> None:
            rows.purge_codes(tx, now)
            rows.add_code(
                tx,
                code_sha256=digest(code),
                identity_id=identity_id,
                project_id=project_id,
                expires_at=now + CODE_SECONDS,
            )

        await self._context.database.write(work)
        return code

    async def code_for(self, actor: Actor) -> str:
        """A sign-in code for the caller itself: how `ficc open` makes its link. A session has every scope of
        its subject, and nobody grants what they do not have."""
        actor.require("tokens:manage")
        scopes = await self._context.database.read(
            lambda c: rows.membership_scopes(c, actor.project_id, actor.subject_id)
        )
        actor.require(*scopes)
        return await self.new_code(actor.subject_id, actor.project_id)

    async def sign_in(self, code: str) -> SignedIn:
        """Exchange a code for a session. Raises Refused `unauthenticated`."""
        context, now = self._context, self._context.now()
        session_id, secret = context.new_id(), context.new_secret()

        def work(tx: Transaction) -> None:
            used = rows.use_code(tx, digest(code), now)
            if used is None:
                raise Refused(
                    "unauthenticated", "The code is unknown, used or expired; `ficc open` makes another."
                )
            rows.purge_sessions(tx, now)
            rows.add_session(
                tx,
                id=session_id,
                secret_sha256=digest(secret),
                identity_id=used.identity_id,
                project_id=used.project_id,
                created_at=now,
                expires_at=now + SESSION_SECONDS,
            )

        await context.database.write(work)
        await self._authority.refresh()
        actor = self._authority.authenticate_session(secret)
        return SignedIn(secret, csrf_token(secret), actor)

    async def sign_out(self, actor: Actor) -> None:
        """End the caller's session, or revoke the caller's own token."""
        now = self._context.now()

        def work(tx: Transaction) -> None:
            if actor.kind == "session":
                rows.end_session(tx, actor.authority_id, now)
            else:
                rows.revoke_tokens(tx, now, id=actor.authority_id)

        await self._context.database.write(work)
        await self._authority.refresh()

    async def session(self, actor: Actor) -> dict[str, Any]:
        """What a caller is: principal, project, scopes."""

        def work(connection: Connection) -> dict[str, Any]:
            return {
                "principal": {
                    "id": actor.subject_id,
                    "name": rows.identity_name(connection, actor.subject_id),
                },
                "project": {
                    "id": actor.project_id,
                    "name": rows.project_name(connection, actor.project_id),
                },
                "scopes": [scope for scope in SCOPES if scope in actor.scopes],
                "session_id": actor.authority_id,
            }

        found = await self._context.database.read(work)
        return {**found, "expires_at": rfc3339(self._authority.expires_at(actor))}

    async def projects(self, actor: Actor) -> list[dict[str, Any]]:
        """The projects that the caller is a member of."""
        found = await self._context.database.read(lambda c: rows.projects_of(c, actor.subject_id))
        return [
            {
                "id": row.id,
                "name": row.name,
                "scopes": list(row.scopes),
                "created_at": rfc3339(row.created_at),
            }
            for row in found
        ]

    # Tokens.

    async def create_token(
        self,
        actor: Actor,
        *,
        label: str,
        scopes: Sequence[str],
        lifetime_seconds: int | None,
        limits: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """A token of the caller's project and subject, with limits of its own where it has any; the secret is in
        this answer only."""
        actor.require("tokens:manage")
        checked = check_scopes(scopes, "scopes")
        actor.require(*checked)  # nobody grants what they do not have
        _check_lifetime(lifetime_seconds, "lifetime_seconds")
        now, secret = self._context.now(), TOKEN_PREFIX + self._context.new_secret()
        expires_at = None if lifetime_seconds is None else now + lifetime_seconds
        token_id = await self._context.database.write(
            lambda tx: self._insert_token(
                tx, secret, actor.subject_id, actor.project_id, label, checked, expires_at, None, limits
            )
        )
        await self._authority.refresh()
        return {"id": token_id, "token": secret, "expires_at": rfc3339(expires_at)}

    def _insert_token(
        self,
        tx: Transaction,
        secret: str,
        subject_id: str,
        project_id: str,
        label: str,
        scopes: Sequence[str],
        expires_at: float | None,
        service_id: str | None,
        limits: Mapping[str, int] | None = None,
    ) -> str:
        token_id = self._context.new_id()
        rows.add_token(
            tx,
            id=token_id,
            project_id=project_id,
            subject_id=subject_id,
            service_id=service_id,
            label=label,
            prefix=secret[:PREFIX_SHOWN],
            secret_sha256=digest(secret),
            scopes=list(scopes),
            created_at=self._context.now(),
            expires_at=expires_at,
            limits=None if limits is None else dict(limits),
        )
        return token_id

    async def create_service_token(
        self, actor: Actor, service_id: str, alias: str, lifetime: int
    ) -> dict[str, Any]:
        """A credential that can invoke this one service. The caller has found the service already."""
        actor.require("inference:manage", "inference:invoke", "tokens:manage")
        _check_lifetime(lifetime, "lifetime")
        now, secret = self._context.now(), TOKEN_PREFIX + self._context.new_secret()

        def work(tx: Transaction) -> str:
            return self._insert_token(
                tx,
                secret,
                actor.subject_id,
                actor.project_id,
                f"service {alias}",
                ["inference:invoke"],
                now + lifetime,
                service_id,
            )

        token_id = await self._context.database.write(work)
        await self._authority.refresh()
        return {"id": token_id, "token": secret, "expires_at": rfc3339(now + lifetime)}

    async def tokens(self, actor: Actor, page: Page) -> tuple[list[dict[str, Any]], str | None]:
        actor.require("tokens:manage")
        found = await self._context.database.read(
            lambda c: rows.tokens(c, actor.project_id, page.after, page.limit)
        )
        shown, cursor = page_of(found, page, lambda row: str(row.id))
        return [_token_json(row) for row in shown], cursor

    async def revoke_token(self, actor: Actor, token_id: str) -> None:
        actor.require("tokens:manage")
        now = self._context.now()
        revoked = await self._context.database.write(
            lambda tx: rows.revoke_tokens(tx, now, id=token_id, project_id=actor.project_id)
        )
        if not revoked:
            raise not_found("token", token_id)
        await self._authority.refresh()


def _token_json(row: Any) -> dict[str, Any]:
    return {
        "id": row.id,
        "label": row.label,
        "prefix": row.prefix,
        "scopes": list(row.scopes),
        "service_id": row.service_id,
        "created_at": rfc3339(row.created_at),
        "expires_at": rfc3339(row.expires_at),
        "last_used_at": rfc3339(row.last_used_at),
        "limits": row.limits or {},
    }


def _check_lifetime(seconds: int | None, param: str) -> None:
    if seconds is not None and not TOKEN_SECONDS_MIN <= seconds <= TOKEN_SECONDS_MAX:
        raise invalid(f"{param} is {TOKEN_SECONDS_MIN} to {TOKEN_SECONDS_MAX} seconds.", param)
