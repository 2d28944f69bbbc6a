"""The provider contract: what an executor asks of whoever makes its sandboxes.

A provider is found by its entry point in the group `ficc.executor`: a class without required arguments,
`API_VERSION = 1`, whose `configure` is called once. Its package digest pins the code that isolates: SHA-256
over the files it ships, and part of every runtime and so of every plan.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ficc.domain.plan import Plan
from ficc.executor import cgroups
from ficc.executor.cgroups import Group

API_VERSION = 1
GROUP = "ficc.executor"
SHARED = (
    "linux",
    "namespace_connect",
    "processes",
    "reach",
    "readback",
    "safe_connect",
    "safe_files",
    "seccomp",
    "view",
)
"""The modules beside this one that the built-in providers isolate with, whose code their digests cover."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the executor tells a provider. `accounts` says whether payloads get their own host accounts
    (the executor is root) or run as the executor's own; below `directory`, where only the executor can
    look, a provider may keep state of its own; without it, it can be asked what it enforces, and no more."""

    accounts: bool
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One sandbox to make. `inputs` maps each input's name to the verified file behind it;
    `uid` and `gid` are the host account of the payload; `write_log` takes output as it comes."""

    attempt_id: str
    plan: Plan
    image_root: Path
    image_environment: Mapping[str, str]
    inputs: Mapping[str, Path]
    group: Group
    uid: int
    gid: int
    write_log: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Exit:
    """How the payload ended: its exit status, or the signal that ended it. Both, where a provider reports a
    signal as a shell does (128 + signal): then the payload may also have exited with that status itself."""

    status: int | None
    signal: int | None

    @classmethod
    def as_shells_report(cls, status: int) -> Exit:
        return cls(status, status - 128 if 128 < status < 128 + signal.NSIG else None)


class LaunchFailed(Exception):
    """The sandbox could not be made, or is not what the plan asks for. Nothing of the payload ran."""


class Sandbox(Protocol):
    """A made sandbox whose payload waits for `start`."""

    async def check(self) -> None:
        """Read back limits, privileges and isolation. Raises LaunchFailed when they differ from the plan."""

    async def start(self) -> None:
        """Let the payload run. Raises LaunchFailed."""

    async def wait(self) -> Exit:
        """Until the payload ended. By then nothing of it is left in the group and its output was taken.
        May be called more than once."""

    def terminate(self) -> None:
        """Ask the payload to end (SIGTERM)."""

    def connect(self, path_or_port: str | int) -> int:
        """A connected socket to the payload's endpoint, as a file descriptor that the caller owns.
        Nothing the payload did to its file system leads elsewhere. Raises OSError."""

    def open_output(self, name: str) -> int:
        """A descriptor, which the caller owns, for reading the regular file that the payload left at /run/ficc/NAME;
        asked from another thread, once the payload ended and before `close`. Nothing the payload did to its file
        system leads elsewhere. Raises OSError."""

    async def close(self) -> None:
        """Give back what this object holds, once the group is empty. Idempotent."""


class Provider(Protocol):
    API_VERSION: int
    name: str
    isolation: str
    package_digest: str
    transports: tuple[str, ...]
    """The transports of an endpoint that `Sandbox.connect` knows: "unix", "tcp"."""

    def configure(self, configuration: Configuration) -> None: ...

    def unenforceable(self) -> Mapping[str, str]:
        """Limits that this provider cannot enforce here, each with why and what to do. A provider that
        cannot run at all names every limit."""

    async def recover(self) -> frozenset[str]:
        """Once, before anything is made: end and remove what sandboxes of an earlier run left besides their
        groups, and prove it. The ids of the attempts of which something was found alive."""

    async def make(self, launch: Launch) -> Sandbox:
        """A sandbox whose processes are all in the group. Raises LaunchFailed, having left nothing but
        what killing the group ends."""


def built_in_digest(package: Path) -> str:
    """The package digest of a built-in provider: over its own directory and all that the providers share."""
    shared = [Path(__file__).with_name(f"{name}.py") for name in SHARED]
    return digest_of_files(shipped_files(package, *shared, Path(cgroups.__file__)))


def digest_of_files(files: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 over names and contents, sorted by name; what a package digest is."""
    total = hashlib.sha256()
    for name, path in sorted(files):
        total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def shipped_files(*modules: Path) -> list[tuple[str, Path]]:
    """The source files of packages and modules, named relative to their parent, without bytecode."""
    files: list[tuple[str, Path]] = []
    for module in modules:
        paths = sorted(module.rglob("*")) if module.is_dir() else [module]
        files += [
            (path.relative_to(module.parent).as_posix(), path)
            for path in paths
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
        ]
    return files
