"""Controllers: the real ones, as `ficc.controller.bootstrap` puts them together, on one SQLite database.

Left out is HTTP: operators call the operations, and requests the gateway, as its routes do.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ficc.content.store import ContentStore
from ficc.controller import bootstrap
from ficc.controller.node_hub import local
from ficc.controller.operations.authority import digest
from ficc.controller.operations.context import Context
from ficc.controller.store import access, models
from ficc.controller.store.database import Database, Transaction, _sqlite_engine, _unavailable
from ficc.domain import acquisition, ids, upload
from ficc.domain.access import SCOPES
from ficc.domain.manifest import File, Manifest
from ficc.settings import Settings
from simulation.loop import THREAD_SECONDS, Process, current
from simulation.reads import Reads, Unhurried, key

if TYPE_CHECKING:
    from simulation.machine import Machine
    from simulation.world import World

T = TypeVar("T")

SECRET = "ficc_of_the_simulation"
WEIGHTS = b"the weights of a model"
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
EPOCH = 1_700_000_000.0


class Scaffold:
    """What every seed of this process begins with: a migrated database with an owner and a verified model, and
    the content directory that goes with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.database = directory / "ficc.sqlite"
        self.content = directory / "content"
        template = directory / "template.sqlite"
        store = ContentStore(self.content, 0)
        store.prepare()
        blob = store.blob(SHA256)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(WEIGHTS)
        blob.chmod(0o444)
        database = Database(f"sqlite:///{template}")
        database.migrate()
        with database._writer.begin() as connection:
            self._fill(Transaction(connection))
        database.close()
        with sqlite3.connect(template) as plain:
            plain.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        plain.close()
        self._template = template
        # Kept from seed to seed: engines remember compiled statements.
        url = f"sqlite:///{self.database}"
        self.writer = _sqlite_engine(url, 1, writing=True)
        self.reader = Unhurried(_sqlite_engine(url, 1, writing=False))
        self.reads = Reads(self.writer, self.reader)
        time.sleep(0.05)  # executors wait for a file that has just been written

    def _fill(self, tx: Transaction) -> None:
        chance = random.Random(0)

        def new_id() -> str:
            return ids.make(int(EPOCH * 1000), chance.randbytes(ids.RANDOM_BYTES))

        self.project, owner, self.model = new_id(), new_id(), new_id()
        access.add_installation(tx, new_id(), EPOCH)
        access.add_identity(tx, owner, "owner", EPOCH)
        access.add_project(tx, self.project, "default", EPOCH)
        access.set_membership(tx, self.project, owner, SCOPES)
        access.add_token(
            tx,
            id=new_id(),
            project_id=self.project,
            subject_id=owner,
            service_id=None,
            label="of the simulation",
            prefix=SECRET[:12],
            secret_sha256=digest(SECRET),
            scopes=list(SCOPES),
            created_at=EPOCH,
            expires_at=None,
        )
        manifest = Manifest("tiny", "gguf", (File("tiny.gguf", len(WEIGHTS), SHA256),), ("chat",))
        before = acquisition.Record()
        models.add(tx, models.Model(self.model, self.project, manifest.revision, manifest, before, EPOCH))
        models.add_blob(tx, SHA256, len(WEIGHTS), EPOCH)
        verified = upload.Record(SHA256, len(WEIGHTS), len(WEIGHTS), upload.State.VERIFIED, None)
        models.set_content(tx, self.project, verified, token=None)
        models.set_record(tx, self.model, before, acquisition.Record(acquisition.State.READY))

    def fresh(self) -> None:
        """The database as it was at first, and nothing of an earlier seed."""
        self.writer.dispose()
        self.reader.dispose()
        self.reads.forget()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.database}{suffix}").unlink(missing_ok=True)
        shutil.copyfile(self._template, self.database)
        machines = self.directory / "machines"
        shutil.rmtree(machines, ignore_errors=True)
        os.makedirs(machines)


def _known_by(work: Any) -> tuple[Any, ...] | None:
    """By what a reading function is known: its code and what it encloses."""
    code = getattr(work, "__code__", None)
    if code is None:
        return None
    return code, key(tuple(cell.cell_contents for cell in work.__closure__ or ()))


class SimulatedDatabase(Database):
    def __init__(self, world: World) -> None:
        self._world = world
        self.url = f"sqlite:///{world.scaffold.database}"
        self.is_sqlite = False
        """As with PostgreSQL, a controller that starts is not alone."""
        self._writer = world.scaffold.writer
        self._reader = world.scaffold.reader  # type: ignore[assignment]
        self._write_threads = self._read_threads = None  # type: ignore[assignment]
        self._listeners = []

    def migrate(self, versions: Path | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    async def _read_within(self, seconds: float, work: Callable[[Any], T]) -> T:
        """What was read before and cannot have changed is not read again: most of what a controller asks while
        nothing happens."""
        if self._world.database_away:
            raise _unavailable()
        known = _known_by(work)
        if known is None:
            return await super()._read_within(seconds, work)

        def remembered(connection: Any) -> T:
            if known not in self._world.remembered:
                self._world.remembered[known] = work(connection)
            return self._world.remembered[known]  # type: ignore[no-any-return]

        if known in self._world.remembered:
            await asyncio.sleep(self._world.chance.uniform(*THREAD_SECONDS))
            if known in self._world.remembered:
                return self._world.remembered[known]  # type: ignore[no-any-return]
        return await super()._read_within(seconds, remembered)

    def _commit(self, work: Callable[[Transaction], T]) -> tuple[T, list[Any]]:
        current()
        if self._world.database_away:
            raise _unavailable()
        self._world.remembered.clear()
        result = super()._commit(work)
        self._world.invariants.committed()
        if self._world.database_flaky and self._world.chance.random() < 0.1:
            raise _unavailable()  # committed, and the answer was lost
        return result


class Controller:
    """One controller: its process, if it has one, and what goes on from life to life."""

    def __init__(self, world: World, name: str, host: Machine) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.ahead = 0.0
        """Of its wall clock."""
        self.process: Process | None = None
        self.real: bootstrap.Controller | None = None
        self.up = False

    def start(self) -> None:
        if self.process is not None and not self.process.dead:
            return
        process = self.process = Process(self.world.loop, self.host, self.name)
        process.on_death.append(lambda: self._died(process))
        self.world.trace(f"{self.name} starts")
        process.run(self._run(process))

    def _died(self, process: Process) -> None:
        self.world.trace(f"{self.name} is dead")
        self.up = False
        self.real = None
        self.world.network.process_died(process)

    async def _run(self, process: Process) -> None:
        settings = self.world.settings
        while True:
            real = bootstrap.Controller(settings)
            try:
                await real.start()
            except Exception as error:  # the database is away: its supervisor starts it again
                self.world.trace(f"{self.name} did not start: {error}")
                await real.stop()
                process.kill()
                return
            self.real = real
            self.up = True
            return

    async def end_in_order(self) -> None:
        process, real = self.process, self.real
        if process is None or real is None or process.dead:
            return
        self.world.trace(f"{self.name} ends in order")
        self.up = False

        async def end() -> None:
            await real.stop()
            process.kill()

        process.run(end())

    def now(self) -> float:
        return EPOCH + self.world.loop.now + self.ahead


def link_to(world: World) -> type[local.LocalLink]:
    """A link whose clock of leases is the node's own, wherever the controller runs."""

    class Link(local.LocalLink):
        def lease_clock(self) -> tuple[str, int]:
            found = (one for one in world.machines.values() if one.executor_id == self.node_id)
            return self.boot_id, next(found).clock_ns()

    return Link


class Nodes:
    """In the place of the one local node: a connection to each machine."""

    def __init__(self, hub: Any, socket: Path) -> None:
        world = current().machine.world
        self._nodes = [local.LocalNode(hub, Path(name)) for name in world.machines]

    async def run(self) -> None:
        await asyncio.gather(*(node.run() for node in self._nodes))


def context(settings: Settings, database: Any) -> Context:
    process = current()
    world = process.machine.world
    controller = world.controller_of(process)
    return Context(settings, database, now=controller.now, new_id=world.new_id, new_secret=world.new_id)
