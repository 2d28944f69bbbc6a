"""One container: made, checked, started, watched and removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from ficc.executor.providers import processes, readback, seccomp, view
from ficc.executor.providers.contract import Exit, Launch, LaunchFailed
from ficc.executor.providers.podman import arguments
from ficc.executor.providers.podman.engine import Engine, Unanswered
from ficc.executor.providers.processes import Output, connect_reading
from ficc.executor.providers.reach import Reach

MAKE_SECONDS = 60.0
"""How long podman may take until the payload could start."""
START_SECONDS = 60.0
REMOVE_RETRY_SECONDS = 1.0
OPEN_FILES_MAX = 4096
OOM_SCORE_ADJUSTMENT = 500
WRITABLE_MOUNTS = frozenset(
    (
        *("/proc", "/dev", "/dev/pts", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
        *("/dev/tty", *view.DIRECTORIES.values()),
    )
)
"""All else in a sandbox is mounted read-only. /proc and /dev belong to nobody there."""


class PodmanSandbox:
    def __init__(self, engine: Engine, launch: Launch) -> None:
        self._engine = engine
        self._launch = launch
        self._name = launch.attempt_id
        self._init_pid = 0
        self._init = -1
        self._monitor = -1
        self._stage = -1
        self._log_write = -1
        self._sessions: list[int] = []
        self._ended = asyncio.Event()
        self._closed = False
        self._reach = Reach(launch)
        self._output = Output(launch.write_log)
        self._log_transport: asyncio.ReadTransport | None = None

    # Making.

    async def make(self) -> None:
        """Until the container's first process waits with everything mounted and every privilege dropped.
        Raises LaunchFailed."""
        log_read, self._log_write = os.pipe()
        self._log_transport = await connect_reading(lambda: self._output, log_read)
        limits, programs = self._launch.plan.limits, self._engine.programs
        create = arguments.create(
            programs.podman,
            self._name,
            uid=self._launch.uid,
            gid=self._launch.gid,
            processes=limits.processes,
            open_files_max=OPEN_FILES_MAX,
            oom_score_adjustment=OOM_SCORE_ADJUSTMENT,
            argv=self._launch.plan.argv,
        )
        init = (programs.podman, "init", self._name)
        status = await self._run(create, init, launch=self._document(log_read), seconds=MAKE_SECONDS)
        if status != 0:
            raise LaunchFailed("the sandbox could not be made; the log has what podman said.")
        try:
            await self._take_hold()
        except OSError as error:
            raise LaunchFailed(f"the sandbox cannot be reached, or ended at once ({error}).") from error

    def _document(self, descriptor: int) -> dict[str, Any]:
        launch = self._launch
        environment = {"PATH": view.PATH, **launch.image_environment, **launch.plan.environment}
        return {
            "image_root": str(launch.image_root),
            "inputs": [[name, str(path)] for name, path in launch.inputs.items()],
            "scratch": {
                "bytes": launch.plan.limits.storage_bytes,
                "inodes": launch.plan.limits.storage_inodes,
                "directories": dict(view.DIRECTORIES),
            },
            "program": launch.plan.argv[0],
            "uid": launch.uid,
            "gid": launch.gid,
            "monitor": {
                "join": [str(path) for path in launch.group.join_files()],
                "executor": os.getpid(),
                "descriptor": descriptor,
                "environment": environment,
            },
        }

    async def _run(self, *commands: Any, seconds: float, **options: Any) -> int:
        """The exit status of podman's commands, whose words go to the log. Raises LaunchFailed."""
        process = await self._engine.begin(*commands, stderr=self._log_write, **options)
        self._sessions.append(process.pid)
        try:
            async with asyncio.timeout(seconds):
                return await process.wait()
        except TimeoutError:
            raise LaunchFailed(f"podman was not ready within {seconds:.0f} s.") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _take_hold(self) -> None:
        """Hold the container's processes and namespaces by descriptors. Raises OSError."""
        self._init_pid, monitor = (self._engine.pid(self._name, kind) for kind in ("init", "conmon"))
        self._init, self._monitor = await asyncio.to_thread(self._open, self._init_pid, monitor)
        self._stage = os.open(f"/proc/{monitor}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._reach.hold(self._init_pid)
        if not (processes.is_alive(self._init) and processes.is_alive(self._monitor)):
            raise ProcessLookupError("it ended")
        asyncio.get_running_loop().add_reader(self._monitor, self._monitor_ended)
        await self._reach.enter(self._init_pid)

    def _open(self, *pids: int) -> list[int]:
        """Descriptors of processes that are in the attempt's group."""
        opened: list[int] = []
        try:
            for pid in pids:
                if pid <= 1:
                    raise ProcessLookupError("podman told no process")
                opened.append(os.pidfd_open(pid))
                if not self._launch.group.holds(pid):
                    raise ProcessLookupError(f"the process {pid} is not in the attempt's group")
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        return opened

    def _monitor_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._monitor)
        self._ended.set()

    # Checking and starting.

    async def check(self) -> None:
        try:
            problems = await asyncio.to_thread(self._differences)
        except (OSError, ValueError) as error:
            raise LaunchFailed(f"the sandbox ended while it was checked ({error}).") from error
        if problems:
            raise LaunchFailed("the sandbox differs from its plan: " + "; ".join(problems))

    def _differences(self) -> list[str]:
        problems = readback.differences(self._launch, self._init_pid, self._reach.directory)
        mountinfo = Path(f"/proc/{self._init_pid}/mountinfo").read_text()
        writable = writable_mounts(mountinfo) - WRITABLE_MOUNTS
        if writable:
            problems.append(f"writable are {', '.join(sorted(writable))}")
        policy = self._engine.configuration(self._name)["linux"].get("seccomp", {})
        if calls(policy) != calls(seccomp.profile()):
            problems.append("the policy for system calls is another")
        return problems

    async def start(self) -> None:
        command = (self._engine.programs.podman, "start", self._name)
        if await self._run(command, enter=self._stage, seconds=START_SECONDS) != 0:
            raise LaunchFailed("the payload could not be started; the log has what podman said.")
        self._close_descriptors("_stage", "_log_write")
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._is_confined():  # noqa: ASYNC110
                    await asyncio.sleep(processes.POLL_SECONDS)
        except TimeoutError:
            raise LaunchFailed("no policy for system calls is in force.") from None

    def _is_confined(self) -> bool:
        """Whether the policy for system calls is in force, which comes last before the payload does."""
        try:
            return processes.status(self._init_pid)["Seccomp"] == "2" or not processes.is_alive(self._init)
        except (OSError, KeyError):
            return True  # it ended

    # Running.

    async def wait(self) -> Exit:
        await self._ended.wait()
        await asyncio.to_thread(self._launch.group.kill)
        await self._output.drain()
        status = self._engine.exit_status(self._name)
        if status is None:
            return Exit(None, signal.SIGKILL)  # the monitor was killed with all that it watched
        return Exit.as_shells_report(status)  # which is how the sandbox's init and conmon report a signal

    def terminate(self) -> None:
        processes.terminate_children(self._launch.group, self._init_pid)

    def connect(self, path_or_port: str | int) -> int:
        return self._reach.connect(path_or_port)

    def open_output(self, name: str) -> int:
        return self._reach.open_output(name)

    # Ending.

    async def abandon(self) -> None:
        """End a sandbox that never started. What podman has running first: until the monitor joined the group,
        it is in none, and once all of that is gone, whatever it left is in there."""
        while await asyncio.to_thread(self._kill_sessions):  # noqa: ASYNC110
            await asyncio.sleep(processes.POLL_SECONDS)
        await asyncio.to_thread(self._launch.group.kill)
        await self.close()

    def _kill_sessions(self) -> bool:
        """Kill once what belongs to podman's sessions; whether anything did."""
        found = False
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(path.name)
                pidfd = os.pidfd_open(pid)
                try:
                    if os.getsid(pid) in self._sessions and processes.is_alive(pidfd):
                        found = True
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)
        return found

    async def close(self) -> None:
        if self._closed:
            return
        if self._monitor >= 0:
            asyncio.get_running_loop().remove_reader(self._monitor)
        self._ended.set()
        self._close_descriptors("_stage", "_log_write")
        await self._reach.close()
        if self._log_transport is not None:
            await self._output.drain()
            self._log_transport.close()
        await self._remove()
        await processes.reap(self._is_ours, but=0)
        self._close_descriptors("_init", "_monitor")
        self._closed = True

    async def _remove(self) -> None:
        """Until podman knows nothing of it any more: what cannot be removed now is tried again."""
        while True:
            try:
                await self._engine.remove(self._name)
            except Unanswered:
                await asyncio.sleep(REMOVE_RETRY_SECONDS)
            else:
                return

    def _is_ours(self, pid: int) -> bool:
        return os.getsid(pid) in self._sessions or processes.in_group_of(pid, self._name)

    def _close_descriptors(self, *names: str) -> None:
        for name in names:
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)


def writable_mounts(mountinfo: str) -> set[str]:
    """The mount points that are not read-only, from the text of /proc/PID/mountinfo."""
    fields = (line.split() for line in mountinfo.splitlines())
    return {field[4] for field in fields if "ro" not in field[5].split(",")}


def calls(policy: dict[str, Any]) -> set[tuple[Any, ...]]:
    """A policy for system calls as a set: its default, and what it says of each call."""
    found: set[tuple[Any, ...]] = {("default", policy.get("defaultAction"))}
    for entry in policy.get("syscalls", []):
        conditions = tuple(
            (one["index"], one["op"], one["value"], one.get("valueTwo", 0)) for one in entry.get("args") or []
        )
        for name in entry["names"]:
            found.add((name, entry["action"], entry.get("errnoRet"), conditions))
    return found
