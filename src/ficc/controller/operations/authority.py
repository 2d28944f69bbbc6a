"""Who is asking: credentials against an in-memory snapshot of what holds now.

The snapshot carries the installation's authority version and is read again whenever that rises: at once in
this process, within REFRESH_SECONDS where another controller changed it. While the database does not answer
the last snapshot goes on being used, so running streams are not ended by a fault of ours; its bound is each
credential's own expiry.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace

from ficc.controller.operations.context import Context
from ficc.controller.store import access as rows
from ficc.controller.store.access import Grant
from ficc.controller.store.database import Change
from ficc.controller.waiting import woken
from ficc.domain.access import Actor, effective
from ficc.domain.errors import Refused
from ficc.domain.limits import Allowance

REFRESH_SECONDS = 1.5
"""An open stream outlives its credential by two seconds at most, wherever that was revoked; some are for reading."""
TOUCH_SECONDS = 60.0
"""`last_used_at` of a token moves at most this often."""

log = logging.getLogger("ficc.controller")


def digest(secret: str) -> str:
    """What is stored of a secret. The secrets are 256 random bits, so a plain hash suffices."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


class Authority:
    """`on_change` is called after each new snapshot."""

    def __init__(self, context: Context, on_change: Callable[[], None]) -> None:
        self._context = context
        self._on_change = on_change
        self._version = -1
        self._by_secret: dict[str, Grant] = {}
        self._by_id: dict[str, Grant] = {}
        self._actors: dict[str, Actor] = {}
        self._touched: dict[str, float] = {}
        self._unwritten: dict[str, float] = {}
        self._stale = asyncio.Event()
        self._refreshing = asyncio.Lock()  # so that an older snapshot never replaces a newer one
        context.database.on_commit(self._committed)

    def _committed(self, changes: list[Change]) -> None:
        if any(subject == "authority" for subject, _ in changes):
            self._stale.set()

    async def refresh(self) -> None:
        """Take a new snapshot if the version rose: what was committed before this call is in force after it."""
        async with self._refreshing:
            now = self._context.now()
            self._stale.clear()
            version = await self._context.database.read(rows.version)
            if version == self._version:
                return
            grants = await self._context.database.read(lambda connection: rows.grants(connection, now))
            self._by_secret = {grant.secret_sha256: grant for grant in grants}
            self._by_id = {grant.authority_id: grant for grant in grants}
            allowance = self._context.settings.limits.of_token
            self._actors = {grant.authority_id: _actor_of(grant, allowance) for grant in grants}
            self._touched = {key: at for key, at in self._touched.items() if key in self._by_id}
            self._version = version
        self._on_change()

    async def run(self) -> None:
        """Keep the snapshot fresh, and let live requests be checked against the clock."""
        while True:
            await woken(self._stale, REFRESH_SECONDS)
            try:
                await self.refresh()
                await self.write_last_used()
            except Refused as refused:
                log.warning("the authority snapshot was not refreshed: %s", refused)
                await asyncio.sleep(REFRESH_SECONDS)
            self._on_change()

    # The gateway's port, and the API's.

    def authenticate(self, secret: str) -> Actor:
        """The caller of a bearer credential. Raises Refused `unauthenticated`."""
        grant = self._by_secret.get(digest(secret))
        if grant is None or grant.kind == "session":
            raise _unauthenticated()
        return self._actor(grant)

    def authenticate_session(self, secret: str) -> Actor:
        """The caller of a session cookie. Raises Refused `unauthenticated`."""
        grant = self._by_secret.get(digest(secret))
        if grant is None or grant.kind != "session":
            raise _unauthenticated()
        return self._actor(grant)

    def recheck(self, actor: Actor) -> Actor:
        """The caller as it is now. Raises Refused `unauthenticated` once its credential is gone."""
        grant = self._by_id.get(actor.authority_id)
        if grant is None:
            raise _unauthenticated()
        return self._actor(grant)

    def expires_at(self, actor: Actor) -> float | None:
        grant = self._by_id.get(actor.authority_id)
        return None if grant is None else grant.expires_at

    def _actor(self, grant: Grant) -> Actor:
        now = self._context.now()
        if grant.expires_at is not None and grant.expires_at <= now:
            raise _unauthenticated()
        if grant.kind != "session" and now - self._touched.get(grant.authority_id, 0.0) >= TOUCH_SECONDS:
            self._touched[grant.authority_id] = self._unwritten[grant.authority_id] = now
        return self._actors[grant.authority_id]

    async def write_last_used(self) -> None:
        """Bring `last_used_at` of the tokens that were used since the last call up to date."""
        unwritten, self._unwritten = self._unwritten, {}
        if not unwritten:
            return
        try:
            await self._context.database.write(lambda tx: rows.touch_tokens(tx, unwritten))
        except Refused:
            self._unwritten = {**unwritten, **self._unwritten}
            raise


def _actor_of(grant: Grant, allowance: Allowance) -> Actor:
    return Actor(
        kind=grant.kind,
        authority_id=grant.authority_id,
        subject_id=grant.subject_id,
        project_id=grant.project_id,
        scopes=effective(grant.granted, grant.membership),
        service_id=grant.service_id,
        allowance=replace(allowance, **grant.limits) if grant.limits else allowance,
    )


def _unauthenticated() -> Refused:
    return Refused(
        "unauthenticated",
        "The credential is missing, unknown, revoked or expired; sign in or use another token.",
    )
