"""The bubblewrap provider: a sandbox of namespaces, seccomp and cgroups over an extracted OCI image."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from ficc.domain.plan import Limits
from ficc.executor import cgroups
from ficc.executor.providers import contract, safe_connect, seccomp
from ficc.executor.providers.bubblewrap import arguments, probe
from ficc.executor.providers.contract import Configuration, Exit, Launch, LaunchFailed

MAKE_SECONDS = 15.0
"""How long the shim and bubblewrap may take until the payload could start."""
POLL_SECONDS = 0.002
DRAIN_SECONDS = 2.0
"""How long the last output may take to arrive once nothing runs that could write any."""
OPEN_FILES_MAX = 4096
OOM_SCORE_ADJUSTMENT = 500
INFO_BYTES_MAX = 4096
PR_SET_CHILD_SUBREAPER = 36
PEERS_MAX = 16
"""Processes of one sandbox whose pidfds are kept."""
_SHIM = Path(__file__).with_name("shim.py")


class Bubblewrap:
    API_VERSION = 1
    name = "bubblewrap"
    isolation = "shared-kernel"
    transports = ("unix",)

    def __init__(self) -> None:
        here = Path(__file__).parent
        shared = (here.parent / "seccomp.py", here.parent / "safe_connect.py", Path(cgroups.__file__))
        self.package_digest = contract.digest_of_files(contract.shipped_files(here, *shared))
        self._program = shutil.which("bwrap") or ""
        self._why_not: str | None = None

    def configure(self, configuration: Configuration) -> None:
        self._why_not = probe.why_it_cannot_run(self._program, as_root=configuration.accounts)
        # bubblewrap ends before its init does, which is then this process's child, to be reaped by `close`.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def unenforceable(self) -> Mapping[str, str]:
        """Every limit, when bubblewrap is missing or cannot make a sandbox here."""
        return dict.fromkeys(Limits.__dataclass_fields__, self._why_not) if self._why_not else {}

    async def make(self, launch: Launch) -> BubblewrapSandbox:
        with Descriptors() as ours, Descriptors() as theirs:
            info_read, info_write = ours.keep_reading(theirs)
            log_read, log_write = ours.keep_reading(theirs)
            block_read, block_write = theirs.keep_reading(ours)
            seccomp_fd = theirs.keep(seccomp.descriptor())
            environment = {**launch.image_environment, **launch.plan.environment}
            options = arguments.options(
                environment, info_fd=info_write, block_fd=block_read, seccomp_fd=seccomp_fd
            )
            options_fd = theirs.keep(_file("\0".join(options) + "\0"))
            argv = [self._program, "--args", str(options_fd), "--", *launch.plan.argv]
            descriptors = (info_write, block_read, seccomp_fd, options_fd)
            spec_fd = theirs.keep(_file(json.dumps(_shim_spec(launch, argv, descriptors))))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SHIM), str(spec_fd)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_write,
                stderr=log_write,
                pass_fds=(spec_fd, *descriptors),
                cwd="/",
                env={},
            )
            ours.hand_over()
        sandbox = BubblewrapSandbox(launch, process, block_write)
        try:
            await sandbox.until_made(info_read, log_read)
        except BaseException:
            await asyncio.shield(sandbox.abandon())
            raise
        return sandbox


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


def _shim_spec(launch: Launch, argv: list[str], descriptors: Sequence[int]) -> dict[str, object]:
    limits = launch.plan.limits
    return {
        "parent": os.getpid(),
        "descriptors": list(descriptors),
        "join": [str(path) for path in launch.group.join_files()],
        "uid": launch.uid,
        "gid": launch.gid,
        "image_root": str(launch.image_root),
        "scratch": {
            "bytes": limits.storage_bytes,
            "inodes": limits.storage_inodes,
            "directories": list(arguments.DIRECTORIES),
        },
        "inputs": [[name, str(source)] for name, source in launch.inputs.items()],
        "rlimits": [[resource.RLIMIT_CORE, 0], [resource.RLIMIT_NOFILE, OPEN_FILES_MAX]],
        "oom_score_adj": OOM_SCORE_ADJUSTMENT,
        "argv": argv,
    }


def _file(text: str) -> int:
    """The text in an anonymous file, at its start: nothing of it shows in a command line."""
    fd = os.memfd_create("launch", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class BubblewrapSandbox:
    def __init__(self, launch: Launch, process: asyncio.subprocess.Process, block_write: int) -> None:
        self._launch = launch
        self._process = process
        self._block_write = block_write
        self._init_pid = 0
        self._run_directory = -1
        self._peers: dict[int, int] = {}  # processes of the sandbox that answered, by pid: their pidfds
        self._log_transport: asyncio.ReadTransport | None = None
        self._log_ended = asyncio.Event()

    async def until_made(self, info_read: int, log_read: int) -> None:
        """Until bubblewrap waits at its block with everything mounted and every privilege dropped."""
        pipes = [os.fdopen(fd, "rb", buffering=0) for fd in (info_read, log_read)]
        info = asyncio.StreamReader(limit=INFO_BYTES_MAX)
        info_transport = await _connect(lambda: asyncio.StreamReaderProtocol(info), pipes[0])
        self._log_transport = await _connect(lambda: _Log(self._launch.write_log, self._log_ended), pipes[1])
        try:
            async with asyncio.timeout(MAKE_SECONDS):
                self._init_pid = await self._read_info(info)
                while not self._at_the_block():
                    if self._process.returncode is not None:
                        raise LaunchFailed(await self._last_words())
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise LaunchFailed(f"bubblewrap was not ready within {MAKE_SECONDS:.0f} s.") from None
        finally:
            info_transport.close()
        try:
            self._run_directory = os.open(
                f"/proc/{self._init_pid}/root{arguments.DIRECTORIES['run']}",
                os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
        except OSError as error:
            raise LaunchFailed(f"the sandbox ended as soon as it was made ({error}).") from error

    async def _read_info(self, info: asyncio.StreamReader) -> int:
        try:
            return int(json.loads(await info.read())["child-pid"])
        except (ValueError, KeyError):
            raise LaunchFailed(await self._last_words()) from None

    async def _last_words(self) -> str:
        await self._process.wait()
        await self._drain()
        return "the sandbox could not be made; the log has what bubblewrap said."

    def _at_the_block(self) -> bool:
        """Whether the init has pivoted into the image and dropped its capabilities. Until then
        /proc/PID/root is the host's."""
        try:
            here, there = os.stat("/"), os.stat(f"/proc/{self._init_pid}/root/")
            status = _status(self._init_pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        pivoted = (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
        return pivoted and int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0

    async def check(self) -> None:
        try:
            problems = await asyncio.to_thread(self._differences)
        except OSError as error:
            raise LaunchFailed(f"the sandbox ended while it was checked ({error}).") from error
        if problems:
            raise LaunchFailed("the sandbox differs from its plan: " + "; ".join(problems))

    def _differences(self) -> list[str]:
        launch, pid = self._launch, self._init_pid
        limits = launch.plan.limits
        found: dict[str, int | str] = dict(launch.group.limits())
        root = f"/proc/{pid}/root"
        space = os.fstatvfs(self._run_directory)
        status = _status(pid)
        expected: dict[str, int | str] = {
            "cpu_millis": limits.cpu_millis,
            "memory_bytes": cgroups.whole_pages(limits.memory_bytes),
            "swap_bytes": cgroups.whole_pages(limits.swap_bytes),
            "processes": limits.processes,
            "storage_bytes": cgroups.whole_pages(limits.storage_bytes + cgroups.PAGE - 1),
            "storage_inodes": limits.storage_inodes,
            "host uid": launch.uid,
            "host gid": launch.gid,
            "no_new_privs": "1",
            "capabilities": "0" * 16,
            "root": "ro",
            "interfaces": "lo",
            "in the cgroups": "yes",
            "own namespaces": "yes",
        }
        if launch.uid != os.geteuid():
            expected["supplementary groups"] = ""
        found |= {
            "storage_bytes": space.f_blocks * space.f_frsize,
            "storage_inodes": space.f_files,
            "host uid": int(status["Uid"].split()[0]),
            "host gid": int(status["Gid"].split()[0]),
            "supplementary groups": status["Groups"],
            "no_new_privs": status["NoNewPrivs"],
            "capabilities": max(status[c] for c in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")),
            "root": "ro" if os.statvfs(root).f_flag & os.ST_RDONLY else "rw",
            "interfaces": " ".join(_interfaces(pid)),
            "in the cgroups": "yes" if launch.group.holds(pid) else "no",
            "own namespaces": "yes" if _own_namespaces(pid) else "no",
        }
        return [
            f"{name} is {found[name]}, not {expected[name]}"
            for name in expected
            if found[name] != expected[name]
        ]

    async def start(self) -> None:
        fd, self._block_write = self._block_write, -1
        try:
            os.write(fd, b"x")
        except BrokenPipeError:
            raise LaunchFailed("the sandbox ended before its payload was started.") from None
        finally:
            os.close(fd)

    async def wait(self) -> Exit:
        status = await self._process.wait()
        # bubblewrap's end takes its init along, soon; nothing keeps the output open after this.
        await asyncio.to_thread(self._launch.group.kill)
        await self._drain()
        if status < 0:
            return Exit(None, -status)
        # bubblewrap reports a payload's signal the way shells do.
        return Exit(status, status - 128 if 128 < status < 128 + signal.NSIG else None)

    async def _drain(self) -> None:
        """Until the output was taken, to its end if that comes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._log_ended.wait()

    def terminate(self) -> None:
        """To the init's own children: bubblewrap's init itself ignores SIGTERM."""
        for pid in self._launch.group.processes():
            with contextlib.suppress(OSError, KeyError):
                process = os.pidfd_open(pid)
                try:  # judged after the descriptor is held, so that it cannot be another process by now
                    if int(_status(pid)["PPid"]) == self._init_pid and self._launch.group.has(pid):
                        signal.pidfd_send_signal(process, signal.SIGTERM)
                finally:
                    os.close(process)

    def connect(self, path_or_port: str | int) -> int:
        if not isinstance(path_or_port, str):
            raise OSError("this provider connects to unix sockets only")
        relative = path_or_port.removeprefix(arguments.DIRECTORIES["run"] + "/")
        sock = safe_connect.connect(self._run_directory, relative, self._is_of_this_sandbox)
        return sock.detach()

    def _is_of_this_sandbox(self, pid: int, uid: int) -> bool:
        """A process that was found in the group once is known by its pidfd: while that process lives, its pid
        is no other's, and it cannot leave the group."""
        if pid <= 0 or uid != self._launch.uid:
            return False
        known = self._peers.get(pid)
        if known is not None and _is_alive(known):
            return True
        if not self._launch.group.has(pid):
            return False
        self._forget_peer(pid)
        if len(self._peers) < PEERS_MAX:
            with contextlib.suppress(OSError):
                self._peers[pid] = os.pidfd_open(pid)
        return self._launch.group.has(pid)

    def _forget_peer(self, pid: int) -> None:
        known = self._peers.pop(pid, None)
        if known is not None:
            os.close(known)

    async def abandon(self) -> None:
        """End a sandbox that never started. The process first: until the shim joined, it is in no group, and
        once it is gone whatever it left is in there. The block is opened last, by `close`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await asyncio.to_thread(self._launch.group.kill)
        await self.close()

    async def close(self) -> None:
        for pid in list(self._peers):
            self._forget_peer(pid)
        for name in ("_block_write", "_run_directory"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
        await self._process.wait()
        if self._log_transport is not None:
            await self._drain()
            self._log_transport.close()
        await self._reap()

    async def _reap(self) -> None:
        """Take the exit of what outlived bubblewrap by a moment, so that no zombie stays."""
        until = time.monotonic() + DRAIN_SECONDS
        while self._reap_once() and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    def _reap_once(self) -> bool:
        """Whether a child of ours that was in the attempt's group is still to end. A zombie keeps the name
        of its group, though the group be removed."""
        left = False
        for pid in set(_children()) - {self._process.pid}:
            with contextlib.suppress(OSError):
                if f"/{self._launch.attempt_id}" in Path(f"/proc/{pid}/cgroup").read_text():
                    left |= os.waitpid(pid, os.WNOHANG)[0] == 0
        return left


def _is_alive(pidfd: int) -> bool:
    """A pidfd becomes readable when its process ends (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


class _Log(asyncio.Protocol):
    """Output as it comes, until every process that could write has ended."""

    def __init__(self, write: Callable[[bytes], None], ended: asyncio.Event) -> None:
        self._write = write
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()


async def _connect(protocol: Callable[[], asyncio.BaseProtocol], pipe: BinaryIO) -> asyncio.ReadTransport:
    """Read a pipe; it is the transport's from here on."""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(protocol, pipe)
    return transport


def _children() -> Iterator[int]:
    """Of this process."""
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, path.read_text().split())


def _status(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/status") as file:
        pairs = (line.split(":", 1) for line in file)
        return {name: value.strip() for name, value in pairs}


def _interfaces(pid: int) -> list[str]:
    with open(f"/proc/{pid}/net/dev") as file:
        return [line.split(":")[0].strip() for line in file.readlines()[2:]]


def _own_namespaces(pid: int) -> bool:
    return all(
        os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        for kind in ("user", "pid_for_children", "net", "ipc", "uts", "mnt", "cgroup")
    )
