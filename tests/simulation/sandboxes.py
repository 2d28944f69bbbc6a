"""A provider whose sandboxes hold simulated engines, and the one image that every machine has."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ficc.executor.providers.contract import Exit, Launch, LaunchFailed
from simulation.engines import Engine
from simulation.loop import current

if TYPE_CHECKING:
    from simulation.machine import Machine

PACKAGE_DIGEST = "a" * 64
IMAGE_DIGEST = "sha256:" + "b" * 64


class Sandbox:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._world = engine.world

    async def check(self) -> None:
        await asyncio.sleep(self._world.chance.uniform(0, 0.01))
        if not self._engine.alive:
            raise LaunchFailed("the sandbox ended while it was made.")

    async def start(self) -> None:
        await asyncio.sleep(self._world.chance.uniform(0, 0.01))
        current()
        if not self._engine.alive:
            raise LaunchFailed("the sandbox ended before its payload began.")
        self._engine.begin()

    async def wait(self) -> Exit:
        return await asyncio.shield(self._engine.ended)

    def terminate(self) -> None:
        current()
        self._engine.terminate()

    def connect(self, path_or_port: str | int) -> int:
        if not self._engine.listens:
            raise ConnectionRefusedError("the engine does not listen")
        sock = socket.socket(socket.AF_UNIX)
        descriptor = sock.detach()
        self._world.network.engines[descriptor] = self._engine
        return descriptor

    async def close(self) -> None:
        pass


class Provider:
    API_VERSION = 1
    name = "bubblewrap"
    isolation = "shared-kernel"
    package_digest = PACKAGE_DIGEST
    transports = ("unix", "tcp")

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def unenforceable(self) -> Mapping[str, str]:
        return {}

    async def recover(self) -> frozenset[str]:
        return frozenset()

    async def make(self, launch: Launch) -> Sandbox:
        chance = self._machine.world.chance
        group: Any = launch.group
        await asyncio.sleep(chance.uniform(0.001, 0.05))
        current()
        if not group.made:
            raise LaunchFailed("its control group is gone.")
        engine = Engine(group, launch.plan)
        await asyncio.sleep(chance.choice((0.01, 0.01, 1.0)))
        if not engine.alive:
            raise LaunchFailed("the sandbox ended while it was made.")
        return Sandbox(engine)


class Images:
    """Every machine has the one image."""

    def __init__(self, root: Path) -> None:
        self._image = SimpleNamespace(
            image_digest=IMAGE_DIGEST,
            environment={},
            name="ficc/llama-cpp",
            created_at="2026-01-01T00:00:00Z",
        )

    def get(self, digest: str) -> Any:
        return self._image

    def list(self) -> list[Any]:
        return [self._image]

    def root_of(self, digest: str) -> Path:
        return Path("/")
