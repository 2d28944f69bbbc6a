"""Control groups: v1, v1 with the hybrid v2 mount, and v2.

A `Tree` is the executor's own subtree, one `Group` per attempt below it. What this machine cannot enforce
is known before anything is launched (`Tree.unenforceable`), and what was set is read back (`Group.limits`).

Source: the kernel's documentation, admin-guide/cgroup-v1 and admin-guide/cgroup-v2.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ficc.domain.plan import Limits

PAGE = os.sysconf("SC_PAGE_SIZE")
CPU_PERIOD_US = 100_000
EMPTY_SECONDS = 5.0
"""How long a killed group may take until it is empty."""
MOVE_SECONDS = 5.0
"""How long the processes of a delegated group may go on having children in it while they are moved."""
POLL_SECONDS = 0.002
LEAF = "ficc-processes"
"""Where the processes of a delegated v2 group move to: its inner groups may hold none."""
V1_CONTROLLERS = ("cpu", "memory", "pids", "freezer")
V2_CONTROLLERS = ("cpu", "memory", "pids")
LIMIT_CONTROLLER: Mapping[str, str] = {
    "cpu_millis": "cpu",
    "memory_bytes": "memory",
    "swap_bytes": "memory",
    "processes": "pids",
}
"""Which controller enforces which limit."""


@dataclass(frozen=True, slots=True)
class Mounts:
    """Where the hierarchies are mounted, and this process's own group in each, as directories."""

    v1: Mapping[str, Path]
    v2: Path | None


def read_mounts(mountinfo: str, own_cgroup: str) -> Mounts:
    """From the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    own: dict[str, str] = {}
    for line in own_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else [""]:
            own[controller] = path
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in mountinfo.splitlines():
        before, after = line.split(" - ", 1)
        root, point = (_unescape(text) for text in before.split()[3:5])
        kind, _, options = after.split()[:3]
        if kind == "cgroup2" and v2 is None:
            v2 = _below(point, root, own.get("", "/"))
        elif kind == "cgroup":
            for controller in options.split(","):
                if controller in V1_CONTROLLERS:
                    v1.setdefault(controller, _below(point, root, own.get(controller, "/")))
    return Mounts(v1, v2)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _below(point: str, root: str, own: str) -> Path:
    """The directory of the group `own` under a mount whose root is the group `root`."""
    if root != "/" and (own == root or own.startswith(root + "/")):
        own = own.removeprefix(root)
    return Path(point) / own.lstrip("/")


class Unusable(Exception):
    """No hierarchy here can hold a sandbox; the text says why and what to do."""


class Tree:
    """The executor's subtree in every hierarchy that it uses."""

    def __init__(self, name: str, mounts: Mounts | None = None) -> None:
        self.name = name
        if mounts is None:
            mounts = read_mounts(
                Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
            )
        self.v1: dict[str, Path] = {}
        self.v2: Path | None = None
        self.v2_controllers: frozenset[str] = frozenset()
        self.unenforceable: dict[str, str] = {}
        self._mounts = mounts
        self.claim()

    def claim(self) -> None:
        """Make the subtree, or what is missing of it."""
        try:
            self._claim(self._mounts)
        except Unusable as why:
            self.unenforceable = dict.fromkeys(LIMIT_CONTROLLER, str(why))

    def _claim(self, mounts: Mounts) -> None:
        own = mounts.v2
        if own is not None:
            if own.name == LEAF:  # an earlier executor of the same delegated group put us there
                own = own.parent
            try:
                offered = frozenset((own / "cgroup.controllers").read_text().split())
            except FileNotFoundError as error:
                raise Unusable(
                    f"this process is in the cgroup {own}, which cannot be seen from here; give the container its own "
                    "cgroup namespace, or mount the whole hierarchy."
                ) from error
            self.v2_controllers = offered & frozenset(V2_CONTROLLERS)
        missing = {c for c in V2_CONTROLLERS if c not in mounts.v1 and c not in self.v2_controllers}
        if missing:
            raise Unusable(
                f"no cgroup controller for {', '.join(sorted(missing))} is delegated to this process; start it in a "
                "delegated scope (systemd-run --user --scope -p Delegate=yes ficc up) or as root."
            )
        self.v1 = {c: path / self.name for c, path in mounts.v1.items() if c not in self.v2_controllers}
        if own is not None:
            self._claim_v2(own)
        try:
            for directory in self.v1.values():
                directory.mkdir(exist_ok=True)
        except OSError as error:
            raise Unusable(
                f"cgroup v1 cannot be delegated safely, and {error.filename} is not writable; run the "
                "executor as root, or boot with systemd.unified_cgroup_hierarchy=1."
            ) from error
        swap = self.v1["memory"] / "memory.memsw.limit_in_bytes" if "memory" in self.v1 else None
        if swap is None and self.v2 is not None:
            swap = self.v2 / "memory.swap.max"
        if swap is not None and not swap.exists():
            self.unenforceable["swap_bytes"] = "the kernel does not account swap; boot with swapaccount=1."

    def _claim_v2(self, own: Path) -> None:
        """Take a subtree of the v2 hierarchy: for limits where controllers are there, else only to kill
        and to see emptiness."""
        base = own / self.name
        try:
            base.mkdir(exist_ok=True)
            if self.v2_controllers:
                enable = " ".join(f"+{c}" for c in sorted(self.v2_controllers))
                _divide(own, enable)
                (base / "cgroup.subtree_control").write_text(enable)
        except OSError as error:
            if self.v2_controllers:
                raise Unusable(
                    f"the cgroup {own} is not delegated to this process ({error.strerror}); start it in a delegated "
                    "scope (systemd-run --user --scope -p Delegate=yes ficc up) or as root."
                ) from error
            return
        self.v2 = base

    def ceiling(self) -> dict[str, int]:
        """What the groups above this tree allow for all of it: the limits of a container, or of a service.
        A limit that nobody set is left out."""
        least: dict[str, int] = {}
        for name, read in _LIMITS.items():
            v1 = LIMIT_CONTROLLER[name] in self.v1
            base = self.v1[LIMIT_CONTROLLER[name]] if v1 else self.v2
            with contextlib.suppress(OSError):  # above the highest group that is in sight
                for group in base.parents if base is not None else ():
                    amount = read(group, v1)
                    if amount >= 0:
                        least[name] = min(amount, least.get(name, amount))
        return least

    def group(self, attempt_id: str) -> Group:
        return Group(self, attempt_id)

    def leftovers(self) -> list[str]:
        """The names of groups below this tree: of attempts that live, or that an earlier run left."""
        names: set[str] = set()
        for base in self.bases:
            with contextlib.suppress(FileNotFoundError):
                names.update(entry.name for entry in os.scandir(base) if entry.is_dir())
        return sorted(names)

    def remove(self) -> None:
        """Remove the subtree itself; its groups must be gone."""
        for base in self.bases:
            with contextlib.suppress(OSError):
                base.rmdir()

    @property
    def bases(self) -> list[Path]:
        """The subtree's directory in each hierarchy, in the order in which they are made."""
        return [*([self.v2] if self.v2 is not None else []), *self.v1.values()]


def _divide(own: Path, enable: str) -> None:
    """Enable controllers for the groups below this one, which must be empty for that: while its processes are
    moved others may be born in it, so it is tried until none is left. Raises OSError."""
    until = time.monotonic() + MOVE_SECONDS
    while True:
        _leave_to_a_leaf(own)
        try:
            (own / "cgroup.subtree_control").write_text(enable)
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
        else:
            return


def _leave_to_a_leaf(own: Path) -> None:
    """Move every process of the group into a leaf below it: v2 forbids processes in inner groups."""
    if not (own / "cgroup.type").exists():
        return  # the kernel's root group, which has no such file, is exempt; a container's is not
    leaf = own / LEAF
    leaf.mkdir(exist_ok=True)
    for pid in (own / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(pid)


class Group:
    """The control group of one attempt, in every hierarchy of its tree."""

    def __init__(self, tree: Tree, name: str) -> None:
        self._tree = tree
        self.v1 = {controller: base / name for controller, base in tree.v1.items()}
        self.v2 = None if tree.v2 is None else tree.v2 / name

    @property
    def directories(self) -> list[Path]:
        return [*self.v1.values(), *([self.v2] if self.v2 is not None else [])]

    def create(self, limits: Limits) -> None:
        """Make the directories and set the limits. Raises OSError."""
        for directory in self.directories:
            directory.mkdir(exist_ok=True)
        for path, value in self._settings(limits):
            path.write_text(value)

    def _settings(self, limits: Limits) -> Iterator[tuple[Path, str]]:
        quota = limits.cpu_millis * CPU_PERIOD_US // 1000
        memory_bytes, swap_bytes = whole_pages(limits.memory_bytes), whole_pages(limits.swap_bytes)
        memory, v1 = self._home("memory")
        if v1:
            yield memory / "memory.limit_in_bytes", str(memory_bytes)
            yield memory / "memory.memsw.limit_in_bytes", str(memory_bytes + swap_bytes)
        else:
            yield memory / "memory.max", str(memory_bytes)
            yield memory / "memory.swap.max", str(swap_bytes)
            yield memory / "memory.oom.group", "1"
        cpu, v1 = self._home("cpu")
        if v1:
            yield cpu / "cpu.cfs_period_us", str(CPU_PERIOD_US)
            yield cpu / "cpu.cfs_quota_us", str(quota)
        else:
            yield cpu / "cpu.max", f"{quota} {CPU_PERIOD_US}"
        pids, _ = self._home("pids")
        yield pids / "pids.max", str(limits.processes)

    def limits(self) -> dict[str, int]:
        """The limits in force, read back: cpu_millis, memory_bytes, swap_bytes, processes."""
        found = {name: _LIMITS[name](*self._home(LIMIT_CONTROLLER[name])) for name in _LIMITS}
        memory, v1 = self._home("memory")
        if v1:
            swap = _number(memory / "memory.memsw.limit_in_bytes") - found["memory_bytes"]
        else:
            swap = _number(memory / "memory.swap.max")
        return {**found, "swap_bytes": swap}

    def _home(self, controller: str) -> tuple[Path, bool]:
        """Where a controller keeps this group, and whether that is v1."""
        if controller in self.v1:
            return self.v1[controller], True
        assert self.v2 is not None
        return self.v2, False

    def join_files(self) -> list[Path]:
        """The files to which a process writes "0" to join."""
        return [directory / "cgroup.procs" for directory in self.directories]

    def holds(self, pid: int) -> bool:
        """Whether the process is in this group, in every hierarchy."""
        return all(pid in processes(directory) for directory in self.directories)

    def has(self, pid: int) -> bool:
        """Whether the process is in this group, by the hierarchy that is joined last: one file read."""
        return pid in processes(self.directories[-1])

    def processes(self) -> set[int]:
        """Process ids in any of the hierarchies. A pid is only meaningful while its process is known to
        be alive."""
        found: set[int] = set()
        for directory in self.directories:
            found |= processes(directory)
        return found

    def oom_kills(self) -> int:
        """How many processes of the group the kernel killed for memory."""
        memory, v1 = self._home("memory")
        return _counter(memory / ("memory.oom_control" if v1 else "memory.events"), "oom_kill")

    def process_limit_hits(self) -> int:
        pids, _ = self._home("pids")
        return _counter(pids / "pids.events", "max")

    def memory_bytes(self) -> int:
        """What is charged to the group now, page cache included."""
        memory, v1 = self._home("memory")
        return _number(memory / ("memory.usage_in_bytes" if v1 else "memory.current"))

    def sweep(self) -> bool:
        """Kill every process once; whether there was one."""
        return sweep(self.directories)

    def kill(self, seconds: float = EMPTY_SECONDS) -> bool:
        """Kill every process and wait until the group is empty; whether it is. Blocking; idempotent."""
        return kill_directories(self.directories, seconds)

    def remove(self, seconds: float = EMPTY_SECONDS) -> bool:
        """Remove the emptied directories; whether none is left. Blocking; idempotent."""
        until = time.monotonic() + seconds
        for directory in self.directories:
            while True:
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY or time.monotonic() > until:
                        return False
                    time.sleep(0.005)
                else:
                    break
        return True


def kill_directories(directories: list[Path], seconds: float = EMPTY_SECONDS) -> bool:
    """Kill whatever is in these groups and wait until they are empty; whether they are."""
    until = time.monotonic() + seconds
    while sweep(directories):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def sweep(directories: list[Path]) -> bool:
    """Kill once whatever is in these groups; whether anything was. Never waits.

    Used by the watchdog too, which is handed only the directories.
    """
    if not any(map(processes, directories)):
        return False
    freezers = [d / "freezer.state" for d in directories if (d / "freezer.state").exists()]
    _set(freezers, "FROZEN")  # so that nothing forks past the sweep, and no process id changes hands
    try:
        _set([d / "cgroup.kill" for d in directories if (d / "cgroup.kill").exists()], "1")
        for pid in set().union(*map(processes, directories)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        _set(freezers, "THAWED")
    return True


def whole_pages(count: int) -> int:
    """As the kernel counts memory: what does not fill a page is not given."""
    return count // PAGE * PAGE


def _set(files: list[Path], value: str) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.write_text(value)


def processes(directory: Path) -> set[int]:
    try:
        return {int(pid) for pid in (directory / "cgroup.procs").read_text().split()} - {0}
    except OSError:  # not made yet, or removed
        return set()


def _cpu_millis(group: Path, v1: bool) -> int:
    if v1:
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    else:
        quota, period = (_word(word) for word in (group / "cpu.max").read_text().split())
    return -1 if quota < 0 else quota * 1000 // period


def _memory_bytes(group: Path, v1: bool) -> int:
    return _number(group / ("memory.limit_in_bytes" if v1 else "memory.max"))


def _processes_max(group: Path, v1: bool) -> int:
    return _number(group / "pids.max")


_LIMITS: Mapping[str, Callable[[Path, bool], int]] = {
    "cpu_millis": _cpu_millis,
    "memory_bytes": _memory_bytes,
    "processes": _processes_max,
}
"""How a limit is read from a group's directory, given whether it is of v1. -1: there is none."""


def _word(word: str) -> int:
    return -1 if word == "max" else int(word)


def _number(path: Path) -> int:
    return _word(path.read_text().strip())


def _counter(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except FileNotFoundError:
        pass
    return 0
