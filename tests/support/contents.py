"""Controllers as far as contents go: real ones, on one database and one content directory, at a time of the
test's choosing."""

from __future__ import annotations

import time
from pathlib import Path

from ficc.content.store import ContentStore, Key
from ficc.controller.operations import contents as contents_module
from ficc.controller.operations.contents import Contents
from ficc.controller.operations.context import Context
from ficc.controller.operations.eviction import Eviction
from ficc.controller.operations.models import Models
from ficc.controller.store import models
from ficc.controller.store.database import Database, Transaction
from ficc.domain import acquisition
from ficc.domain.access import SCOPES, Actor
from ficc.domain.upload import Record, State
from ficc.settings import Settings
from support import rows
from support.rows import sha256

DATA = b"weights of a model " * 5000
WRONG = DATA[:-1] + b"?"


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class Controllers:
    """Controllers on one database and one content directory, as far as contents go."""

    def __init__(self, db: Database, folder: Path) -> None:
        self.db = db
        self.clock = Clock()
        self.settings = Settings(state_directory=folder)
        self.store = ContentStore(folder / "content", reserve_bytes=0)
        self.store.prepare()
        self._made: list[Contents] = []

    def contents(self) -> Contents:
        """Another controller's, or the same one's after a restart."""
        made = Contents(Context(self.settings, self.db, now=self.clock), self.store)
        self._made.append(made)
        return made

    def models(self, contents: Contents) -> Models:
        return Models(Context(self.settings, self.db, now=self.clock), contents, {})

    def eviction(self, contents: Contents) -> Eviction:
        return Eviction(Context(self.settings, self.db, now=self.clock), contents)

    async def project(self, name: str) -> str:
        return await self.db.write(lambda tx: rows.project(tx, name))

    async def model(self, project_id: str, *data: bytes, name: str = "model") -> str:
        return await self.db.write(lambda tx: rows.model(tx, project_id, *data, name=name).id)

    async def record(self, key: Key) -> Record:
        found = await self.db.read(lambda c: models.content(c, key.project_id, key.sha256))
        assert found is not None
        return found.record

    async def state(self, project_id: str, model_id: str) -> acquisition.Record:
        found = await self.db.read(lambda c: models.get(c, project_id, model_id))
        assert found is not None
        return found.record

    async def put(self, key: Key, state: State, offset: int) -> None:
        """A row as an earlier controller left it."""

        def work(tx: Transaction) -> None:
            assert models.set_content(
                tx, key.project_id, Record(key.sha256, len(DATA), offset, state), token=None
            )
            contents_module.settle_models(tx, key.project_id, [key.sha256])

        await self.db.write(work)

    async def publish_elsewhere(self) -> None:
        """Another project has DATA."""
        project_id = await self.project("elsewhere")
        await self.model(project_id, DATA)
        await bring(self.contents(), Key(project_id, sha256(DATA)), DATA)

    async def close(self) -> None:
        for contents in self._made:
            await contents.close()


def owner_of(project_id: str) -> Actor:
    return Actor("token", "t", "s", project_id, frozenset(SCOPES))


async def write(contents: Contents, key: Key, data: bytes) -> None:
    async with contents.writing(key, "upload") as claim:
        await contents.write(claim, claim.record.offset, data)
        await contents.commit(claim, len(data))


async def bring(contents: Contents, key: Key, data: bytes) -> Record:
    await write(contents, key, data)
    return await contents.verify(key)
