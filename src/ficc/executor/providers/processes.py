"""What every provider asks of the processes of a sandbox, from outside: descriptors and pipes for them, what the
kernel says of them, and their exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from ficc.executor.cgroups import Group

DRAIN_SECONDS = 2.0
"""How long the last output may take to arrive once nothing runs that could write any."""
REAP_SECONDS = 2.0
POLL_SECONDS = 0.002
PEERS_MAX = 16
"""Processes of one sandbox whose pidfds are kept."""


class Descriptors:
    """File descriptors that are closed on the way out, unless they were handed over."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._held:
            os.close(fd)

    def keep(self, fd: int) -> int:
        self._held.append(fd)
        return fd

    def keep_reading(self, writer: Descriptors) -> tuple[int, int]:
        """A pipe: its reading end is kept here, its writing end there."""
        read, write = os.pipe()
        return self.keep(read), writer.keep(write)

    def hand_over(self) -> None:
        self._held.clear()


def anonymous_file(text: str) -> int:
    """The text in an anonymous file, at its start: nothing of it shows in a command line."""
    fd = os.memfd_create("launch", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def connect_reading(protocol: Callable[[], asyncio.BaseProtocol], fd: int) -> asyncio.ReadTransport:
    """Read a pipe; it is the transport's from here on. Needs uvloop, which closes the descriptor itself: were it
    closed again by the file object, that could be one which another thread has opened in between."""
    pipe = open(fd, "rb", buffering=0, closefd=False)  # noqa: ASYNC230, SIM115  # nothing of it blocks
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(protocol, pipe)
    return transport


class Output(asyncio.Protocol):
    """Output as it comes, until every process that could write has ended."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    async def drain(self) -> None:
        """Until the output was taken, to its end if that comes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._ended.wait()


class Peers:
    """Who may answer at a sandbox's socket. A process that was found in the group once is known by its pidfd:
    while that process lives, its pid is no other's, and it cannot leave the group."""

    def __init__(self, group: Group, uid: int) -> None:
        self._group = group
        self._uid = uid
        self._known: dict[int, int] = {}

    def allowed(self, pid: int, uid: int) -> bool:
        if pid <= 0 or uid != self._uid:
            return False
        known = self._known.get(pid)
        if known is not None and is_alive(known):
            return True
        if not self._group.has(pid):
            return False
        self._forget(pid)
        if len(self._known) < PEERS_MAX:
            with contextlib.suppress(OSError):
                self._known[pid] = os.pidfd_open(pid)
        return self._group.has(pid)

    def _forget(self, pid: int) -> None:
        known = self._known.pop(pid, None)
        if known is not None:
            os.close(known)

    def close(self) -> None:
        for pid in list(self._known):
            self._forget(pid)


def try_out(
    argv: Sequence[str], seconds: float, *, account: int | None = None, pass_fds: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """What a program of this machine does when it is started with nothing of ours; as this user, with this group
    alone. Raises OSError, subprocess.TimeoutExpired."""
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        cwd="/",
        env={},
        pass_fds=pass_fds,
        user=account,
        group=account,
        extra_groups=None if account is None else [],
    )


def terminate_children(group: Group, init_pid: int) -> None:
    """SIGTERM to the children of a sandbox's init: the payload. The init itself ignores it, or only passes it on."""
    for pid in group.processes():
        with contextlib.suppress(OSError, KeyError):
            process = os.pidfd_open(pid)
            try:  # judged after the descriptor is held, so that it cannot be another process by now
                if int(status(pid)["PPid"]) == init_pid and group.has(pid):
                    signal.pidfd_send_signal(process, signal.SIGTERM)
            finally:
                os.close(process)


async def reap(ours: Callable[[int], bool], but: int) -> None:
    """Take the exits of children for which `ours` holds and which end soon, so that no zombie stays; `but` is
    somebody else's to wait for."""
    until = time.monotonic() + REAP_SECONDS
    while _reap_once(ours, but) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(POLL_SECONDS)


def _reap_once(ours: Callable[[int], bool], but: int) -> bool:
    """Whether such a child is still to end."""
    left = False
    for pid in set(children()) - {but}:
        with contextlib.suppress(OSError):
            if ours(pid):
                left |= os.waitpid(pid, os.WNOHANG)[0] == 0
    return left


def in_group_of(pid: int, attempt_id: str) -> bool:
    """Whether a process is in an attempt's group, by name: a zombie keeps it, though the group be removed.
    Raises OSError when it is gone."""
    return f"/{attempt_id}" in Path(f"/proc/{pid}/cgroup").read_text()


def is_alive(pidfd: int) -> bool:
    """A pidfd becomes readable when its process ends (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def children() -> Iterator[int]:
    """Of this process."""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, path.read_text().split())


def status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        pairs = (line.split(":", 1) for line in file)
        return {name: value.strip() for name, value in pairs}
