"""The watchdog's process: what the real one decides, killed and stopped by itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ficc.domain.lease import SECOND
from ficc.executor import watchdog as watchdog_module
from simulation.groups import sweep
from simulation.loop import Process, current

if TYPE_CHECKING:
    from simulation.machine import Machine


class Watchdog(watchdog_module.Watchdog):
    """The real one's decisions, in a process of its own, on this machine's clock. It is also the executor's end of
    the socket that leads to it."""

    def __init__(self, machine: Machine, directory: Path) -> None:
        self.machine = machine
        self.directory = directory
        self.armed = {}
        self.process = Process(machine.world.loop, machine, f"watchdog {machine.name}")
        self.process.on_death.append(self._died)
        self._owner = current()
        self._answers: list[bytes] = []
        self._waiting: asyncio.Future[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # The executor's side.

    def child(self) -> Any:
        async def wait() -> None:
            await asyncio.shield(self.process.ended)

        return SimpleNamespace(wait=wait, kill=self.process.kill)

    def send(self, order: bytes) -> None:
        if self._closed or self.process.dead:
            raise BrokenPipeError
        self.process.later(self.machine.world.network.latency(), self._order, order)

    async def receive(self) -> bytes:
        if not self._answers:
            if self._closed or self.process.dead:
                return b""
            self._waiting = self.machine.world.loop.create_future()
            return await self._waiting
        return self._answers.pop(0)

    def close(self) -> None:
        self._closed = True
        self.process.later(self.machine.world.network.latency(), self._gone)

    def _answer(self, answer: bytes) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(answer)
        else:
            self._answers.append(answer)

    def _died(self) -> None:
        self.machine.world.trace(f"{self.process.name} is dead")
        self._owner.later(0.001, self._answer, b"")

    # Its own side.

    def executor_gone(self) -> None:
        self.process.later(self.machine.world.chance.uniform(0, 0.02), self._gone)

    def _order(self, message: bytes) -> None:
        order = json.loads(message)
        ended = self._obey(order)
        if not ended:
            self.machine.world.invariants.deadline_set(self.machine, order)
        self._owner.later(
            self.machine.world.network.latency(),
            self._answer,
            json.dumps({"n": order["n"], "ended": ended}).encode(),
        )
        self._look()

    def _look(self) -> None:
        now_ns = self.machine.clock_ns()
        for attempt_id, armed in self.armed.items():
            if armed.due_ns <= now_ns:
                self._end(attempt_id, armed, "lease_lapsed", now_ns)
        if self._timer is not None:
            self._timer.cancel()
        if self.armed:
            due = min(armed.due_ns for armed in self.armed.values())
            self._timer = self.process.later(max(0.001, (due - now_ns) / SECOND), self._look)

    def _gone(self) -> None:
        """The executor's end is closed: end everything, then oneself."""
        for attempt_id, armed in self.armed.items():
            self._end(attempt_id, armed, "executor_gone", 0)
        if all(armed.empty for armed in self.armed.values()):
            self.process.kill()
        else:
            self.process.later(watchdog_module.RETRY_SECONDS, self._gone)

    def sweep(self, groups: list[Path]) -> bool:
        return any(sweep(self.machine.group(path.name)) for path in groups)


def sweep_for_the_watchdog(groups: list[Path]) -> bool:
    process = current()
    guard = process.machine.watchdog
    assert guard is not None
    return guard.sweep(groups)
