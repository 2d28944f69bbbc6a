"""The bubblewrap provider: a sandbox of namespaces, seccomp and cgroups over an extracted OCI image."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ficc.domain.plan import Limits
from ficc.executor.providers import contract, processes, readback, seccomp, view
from ficc.executor.providers.bubblewrap import arguments, probe
from ficc.executor.providers.contract import Configuration, Exit, Launch, LaunchFailed
from ficc.executor.providers.processes import Descriptors, Output, anonymous_file, connect_reading
from ficc.executor.providers.reach import Reach

MAKE_SECONDS = 15.0
"""How long the shim and bubblewrap may take until the payload could start."""
POLL_SECONDS = 0.002
OPEN_FILES_MAX = 4096
OOM_SCORE_ADJUSTMENT = 500
INFO_BYTES_MAX = 4096
PR_SET_CHILD_SUBREAPER = 36
_SHIM = Path(__file__).with_name("shim.py")


class Bubblewrap:
    API_VERSION = 1
    name = "bubblewrap"
    isolation = "shared-kernel"
    transports = ("unix", "tcp")

    def __init__(self) -> None:
        self.package_digest = contract.built_in_digest(Path(__file__).parent)
        self._program = shutil.which("bwrap") or ""
        self._why_not: str | None = None

    def configure(self, configuration: Configuration) -> None:
        self._why_not = probe.why_it_cannot_run(self._program, as_root=configuration.accounts)
        # bubblewrap ends before its init does, which is then this process's child, to be reaped by `close`.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def unenforceable(self) -> Mapping[str, str]:
        """Every limit, when bubblewrap is missing or cannot make a sandbox here."""
        return dict.fromkeys(Limits.__dataclass_fields__, self._why_not) if self._why_not else {}

    async def recover(self) -> frozenset[str]:
        """Nothing: all that a sandbox is made of vanishes with its processes."""
        return frozenset()

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
            options_fd = theirs.keep(anonymous_file("\0".join(options) + "\0"))
            argv = [self._program, "--args", str(options_fd), "--", *launch.plan.argv]
            descriptors = (info_write, block_read, seccomp_fd, options_fd)
            spec_fd = theirs.keep(anonymous_file(json.dumps(_shim_spec(launch, argv, descriptors))))
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
            "directories": list(view.DIRECTORIES),
        },
        "inputs": [[name, str(source)] for name, source in launch.inputs.items()],
        "rlimits": [[resource.RLIMIT_CORE, 0], [resource.RLIMIT_NOFILE, OPEN_FILES_MAX]],
        "oom_score_adj": OOM_SCORE_ADJUSTMENT,
        "argv": argv,
    }


class BubblewrapSandbox:
    def __init__(self, launch: Launch, process: asyncio.subprocess.Process, block_write: int) -> None:
        self._launch = launch
        self._process = process
        self._block_write = block_write
        self._init_pid = 0
        self._reach = Reach(launch)
        self._output = Output(launch.write_log)
        self._log_transport: asyncio.ReadTransport | None = None

    async def until_made(self, info_read: int, log_read: int) -> None:
        """Until bubblewrap waits at its block with everything mounted and every privilege dropped."""
        info = asyncio.StreamReader(limit=INFO_BYTES_MAX)
        with Descriptors() as waiting:
            waiting.keep(log_read)
            info_transport = await connect_reading(lambda: asyncio.StreamReaderProtocol(info), info_read)
            waiting.hand_over()
        self._log_transport = await connect_reading(lambda: self._output, log_read)
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
            self._reach.hold(self._init_pid)
            await self._reach.enter(self._init_pid)
        except OSError as error:
            raise LaunchFailed(f"the sandbox cannot be reached, or ended at once ({error}).") from error

    async def _read_info(self, info: asyncio.StreamReader) -> int:
        try:
            return int(json.loads(await info.read())["child-pid"])
        except (ValueError, KeyError):
            raise LaunchFailed(await self._last_words()) from None

    async def _last_words(self) -> str:
        await self._process.wait()
        await self._output.drain()
        return "the sandbox could not be made; the log has what bubblewrap said."

    def _at_the_block(self) -> bool:
        """Whether the init has pivoted into the image and dropped its capabilities. Until then
        /proc/PID/root is the host's."""
        try:
            here, there = os.stat("/"), os.stat(f"/proc/{self._init_pid}/root")
            status = processes.status(self._init_pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        pivoted = (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
        return pivoted and int(status["CapEff"], 16) == 0 and int(status["CapBnd"], 16) == 0

    async def check(self) -> None:
        try:
            problems = await asyncio.to_thread(
                readback.differences, self._launch, self._init_pid, self._reach.directory
            )
        except OSError as error:
            raise LaunchFailed(f"the sandbox ended while it was checked ({error}).") from error
        if problems:
            raise LaunchFailed("the sandbox differs from its plan: " + "; ".join(problems))

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
        await self._output.drain()
        if status < 0:
            return Exit(None, -status)
        return Exit.as_shells_report(status)  # which is how bubblewrap reports a payload's signal

    def terminate(self) -> None:
        """To the init's own children: bubblewrap's init itself ignores SIGTERM."""
        processes.terminate_children(self._launch.group, self._init_pid)

    def connect(self, path_or_port: str | int) -> int:
        return self._reach.connect(path_or_port)

    def open_output(self, name: str) -> int:
        return self._reach.open_output(name)

    async def abandon(self) -> None:
        """End a sandbox that never started. The process first: until the shim joined, it is in no group, and
        once it is gone whatever it left is in there. The block is opened last, by `close`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await asyncio.to_thread(self._launch.group.kill)
        await self.close()

    async def close(self) -> None:
        fd, self._block_write = self._block_write, -1
        if fd >= 0:
            os.close(fd)
        await self._reach.close()
        await self._process.wait()
        if self._log_transport is not None:
            await self._output.drain()
            self._log_transport.close()
        await processes.reap(
            lambda pid: processes.in_group_of(pid, self._launch.attempt_id), but=self._process.pid
        )
