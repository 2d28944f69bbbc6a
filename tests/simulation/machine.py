"""A machine: its clock, its control groups and what runs in them, its executor and the executor's watchdog.

The executor is the real one, from its socket's protocol to its ledger; so is what the watchdog decides. Simulated are
the processes in the groups, the sandboxes, and the disk where it has faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ficc.domain.lease import SECOND
from ficc.domain.plan import Limits
from ficc.executor import main as executor_main
from ficc.executor.guard import Watchdog as Guard
from ficc.executor.ledger import Ledger
from ficc.executor.main import Executor
from ficc.executor.server import Connection
from ficc.executor.settings import ExecutorSettings
from simulation.groups import Group, Tree
from simulation.loop import Process, current
from simulation.sandboxes import Provider
from simulation.watchdog import Watchdog

if TYPE_CHECKING:
    from simulation.world import World

CAPACITY = Limits(4000, 4 << 30, 0, 1000, 1 << 30, 1 << 20)


class Machine:
    """`boots` counts up; every boot has its own id, and its clock begins anew."""

    def __init__(self, world: World, name: str, directory: Path) -> None:
        self.world = world
        self.name = name
        self.directory = directory
        self.boots = 0
        self.booted_at = 0.0
        self.groups: dict[str, Group] = {}
        self.executor: Process | None = None
        self.watchdog: Watchdog | None = None
        self.running: Executor | None = None
        self.listener: Callable[[], Connection] | None = None
        self.disk_full = False
        self.executor_id = ""
        self.dies_with_executor = world.chance.random() < 0.7
        """Whether sandboxes end with the executor that made them, as bubblewrap's do, or live on as Podman's."""
        self.boot()

    def boot(self) -> None:
        self.boots += 1
        self.booted_at = self.world.loop.now - self.world.chance.uniform(5, 5000)
        self.boot_id = f"{self.name}-boot-{self.boots}"

    def clock_ns(self) -> int:
        return int((self.world.loop.now - self.booted_at) * SECOND)

    def group(self, name: str) -> Group:
        if name not in self.groups:
            self.groups[name] = Group(self, name)
        return self.groups[name]

    @property
    def unguarded(self) -> bool:
        """Whether neither the executor nor its watchdog can act: then nobody ends what runs."""
        guard, executor = self.watchdog, self.executor
        return (guard is None or guard.process.dead or guard.process.stopped) and (
            executor is None or executor.dead or executor.stopped
        )

    # Its executor.

    def start_executor(self) -> None:
        if self.executor is not None and not self.executor.dead:
            return
        process = Process(self.world.loop, self, f"executor {self.name}")
        self.executor = process
        process.on_death.append(lambda: self._executor_died(process))
        process.run(self._run_executor(process))
        self.world.trace(f"{process.name} starts")

    def _executor_died(self, process: Process) -> None:
        self.world.trace(f"{process.name} is dead")
        self.listener = None
        self.world.network.process_died(process)
        if self.running is not None:
            with contextlib.suppress(sqlite3.Error):
                self.running.ledger._db.close()
        if self.watchdog is not None:
            self.watchdog.executor_gone()
        for group in self.groups.values():
            for engine in list(group.engines):
                if self.dies_with_executor or not engine.is_payload:
                    self.world.loop.call_later(
                        self.world.chance.uniform(0, 0.3), engine.die, signal.SIGKILL, ""
                    )

    async def _run_executor(self, process: Process) -> None:
        settings = ExecutorSettings(
            state_directory=self.directory,
            content_directory=self.world.content_directory,
            socket=self.directory / "socket",
        )
        ending = asyncio.Event()
        faults: list[str] = []

        def fault(error: BaseException | None) -> None:
            faults.append(repr(error))
            self.world.trace(f"{process.name}: fault {error!r}")
            if not self.world.may_fault(error):
                self.world.violated(f"a fault of the executor: {error!r}")
            ending.set()

        settings = executor_main.replace(settings, on_fault=fault)
        executor_main.prepare_directories(settings)
        process.end = ending.set  # type: ignore[attr-defined]
        while self.watchdog is not None and not self.watchdog.process.dead:
            await asyncio.sleep(executor_main.LOCK_POLL_SECONDS)
        ledger = _Ledger(self)
        self.executor_id = ledger.executor_id
        self.watchdog = Watchdog(self, settings.verdicts_directory)
        guard = Guard(self.watchdog.child(), self.watchdog)  # type: ignore[arg-type]
        executor = Executor(settings, ledger, Provider(self), Tree(self), guard)  # type: ignore[arg-type]
        self.running = executor
        self.world.invariants.watch_executor(self, executor)
        await executor.attempts.recover()
        self.listener = lambda: Connection(executor.server)
        await executor_main._until_it_ends(ending, executor, faults)
        self.listener = None
        await executor.attempts.shutdown(0.0 if faults else executor_main.SHUTDOWN_GRACE_SECONDS)
        await guard.close()
        ledger.close()
        process.kill()

    def power_off(self) -> None:
        """Everything that runs is gone at once, and nobody was told."""
        self.world.trace(f"{self.name} loses power")
        silently = self.world.chance.uniform(0, 20)
        if self.executor is not None:
            self.executor.on_death.insert(
                0,
                lambda: self.world.network.process_died(self.executor, silently=silently),  # type: ignore[arg-type]
            )
        if self.watchdog is not None:
            self.watchdog.process.kill()
        for group in self.groups.values():
            for engine in list(group.engines):
                engine.stuck_until = 0.0
                engine.die(signal.SIGKILL, "")
        if self.executor is not None:
            self.executor.kill()
        self.groups.clear()
        self.boot()


class _Ledger(Ledger):
    """On a disk that may be full."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        super().__init__(machine.directory / "ledger.sqlite", machine.name)

    def _write(self, statement: str, *values: Any) -> bool:
        current()
        if self._machine.disk_full:
            return False
        written = super()._write(statement, *values)
        self._machine.world.invariants.dirty = True
        return written
