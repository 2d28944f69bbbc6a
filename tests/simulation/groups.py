"""Control groups of a machine: which attempts have one, and what lives in each."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ficc.domain.plan import Limits
from simulation.loop import current

if TYPE_CHECKING:
    from simulation.engines import Engine
    from simulation.machine import Machine


class Tree:
    unenforceable: Mapping[str, str] = {}

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def ceiling(self) -> dict[str, int]:
        return {}

    def group(self, name: str) -> Group:
        return self._machine.group(name)

    def leftovers(self) -> list[str]:
        current()
        return sorted(name for name, group in self._machine.groups.items() if group.made)

    def remove(self) -> None:
        pass


class Group:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.made = False
        self.engines: list[Engine] = []

    @property
    def directories(self) -> list[Path]:
        return [Path(self.name)]

    def create(self, limits: Limits) -> None:
        current()
        self.made = True

    def processes(self) -> set[int]:
        return {engine.pid for engine in self.engines}

    def oom_kills(self) -> int:
        return 0

    def process_limit_hits(self) -> int:
        return 0

    def memory_bytes(self) -> int:
        return 0

    def sweep(self) -> bool:
        return sweep(self)

    def kill(self, seconds: float = 0.0) -> bool:
        sweep(self)
        return not self.engines

    def remove(self, seconds: float = 0.0) -> bool:
        current()
        if not self.engines:
            self.made = False
        return not self.engines


def sweep(group: Group) -> bool:
    """Kill once whatever is there; whether anything was."""
    who = current()
    found = bool(group.engines)
    for engine in list(group.engines):
        group.machine.world.invariants.found_alive(engine, who)
        engine.die(signal.SIGKILL, who.name)
    return found
