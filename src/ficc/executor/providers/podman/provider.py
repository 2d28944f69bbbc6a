"""The podman provider: the limits, the network, the accounts and the system-call policy are those of every
provider; podman's command line makes the containers, and the executor's own code proves what they are."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from ficc.domain.plan import Limits
from ficc.executor.providers import contract, processes
from ficc.executor.providers.contract import Configuration, Launch, LaunchFailed
from ficc.executor.providers.podman import probe
from ficc.executor.providers.podman.engine import Container, Engine, Unanswered
from ficc.executor.providers.podman.sandbox import PodmanSandbox

KILL_SECONDS = 5.0
"""How long a killed process may take until it is gone."""
PR_SET_CHILD_SUBREAPER = 36


class Podman:
    API_VERSION = 1
    name = "podman"
    isolation = "shared-kernel"
    transports = ("unix", "tcp")

    def __init__(self) -> None:
        self.package_digest = contract.built_in_digest(Path(__file__).parent)
        self._programs = probe.find_programs()
        self._why_not: str | None = None
        self._engine: Engine | None = None

    def configure(self, configuration: Configuration) -> None:
        self._why_not = probe.why_it_cannot_run(self._programs, as_root=configuration.accounts)
        if configuration.directory is not None:
            self._engine = Engine(self._programs, configuration.directory / "podman")
        # A container's monitor outlives the podman that starts it: then this process's child, to be reaped.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def unenforceable(self) -> Mapping[str, str]:
        """Every limit, when podman is missing or cannot make a sandbox here."""
        return dict.fromkeys(Limits.__dataclass_fields__, self._why_not) if self._why_not else {}

    @property
    def engine(self) -> Engine:
        """Raises LaunchFailed for a provider that has no place for podman's state."""
        if self._engine is None:
            raise LaunchFailed("the provider podman was given no directory of its own.")
        return self._engine

    async def recover(self) -> frozenset[str]:
        """Find by label what an earlier executor left, end it, and remove everything podman knew of it. Where
        podman does not answer any more, that is removed unasked: what lives is in the attempts' groups too,
        which the executor ends."""
        if self._engine is None or self._why_not is not None:
            return frozenset()
        engine = self._engine
        await asyncio.to_thread(engine.forget_other_boots)
        alive: set[str] = set()
        if engine.home.exists():
            await asyncio.to_thread(engine.prepare)
            try:
                for container in await engine.containers():
                    if await self._end(container):
                        alive.add(container.name)
                    await engine.remove(container.name)
            except Unanswered:
                pass
            await asyncio.to_thread(engine.forget)
        return frozenset(alive)

    async def _end(self, container: Container) -> bool:
        """Kill the first process of a container and its monitor; whether one was alive."""
        monitor = self.engine.pid(container.name, "conmon")
        found = [await _kill(pid, container.name) for pid in (container.pid, monitor)]
        return any(found)

    async def make(self, launch: Launch) -> PodmanSandbox:
        await asyncio.to_thread(self.engine.prepare)
        sandbox = PodmanSandbox(self.engine, launch)
        try:
            await sandbox.make()
        except BaseException:
            await asyncio.shield(sandbox.abandon())
            raise
        return sandbox


async def _kill(pid: int, attempt_id: str) -> bool:
    """Kill a process of an attempt and wait until it is gone; whether there was one. A container that does not
    run has the pid 0, and a pid may be another process's by now: it must be in the attempt's group."""
    if pid <= 1:
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if not processes.is_alive(pidfd) or not processes.in_group_of(pid, attempt_id):
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        until = time.monotonic() + KILL_SECONDS
        while processes.is_alive(pidfd):
            if time.monotonic() > until:
                raise Unanswered(f"the process {pid} of {attempt_id} does not end.")
            await asyncio.sleep(processes.POLL_SECONDS)
    finally:
        os.close(pidfd)
    return True
