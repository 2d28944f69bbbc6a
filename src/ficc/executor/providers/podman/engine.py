"""Podman's command line on a state directory of the executor's own.

Everything podman keeps is below one directory per boot of the machine: what an earlier boot left names
processes that are no longer what they were, so podman is never asked about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ficc import clock
from ficc.executor.providers import processes, seccomp
from ficc.executor.providers.podman import arguments, stage
from ficc.executor.providers.podman.arguments import LABEL, Programs

COMMAND_SECONDS = 120.0
"""How long podman may take for one command."""
REMOVE_TRIES = 5
"""A container can need more than one removal."""
ANSWER_BYTES_MAX = 4 << 20
_STAGE = Path(__file__).with_name("stage.py")
_MONITOR = Path(__file__).with_name("monitor.py")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    output: bytes
    errors: bytes


@dataclass(frozen=True, slots=True)
class Container:
    """One that podman knows. `pid` is 0 for one that does not run."""

    name: str
    pid: int


class Unanswered(Exception):
    """Podman did not do what it was asked; the text has what it said."""


class Engine:
    def __init__(self, programs: Programs, directory: Path) -> None:
        self.programs = programs
        self._directory = directory
        self.home = directory / clock.boot_id()

    def prepare(self) -> None:
        """Make what is missing of podman's directories and settings. Blocking."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in stage.DIRECTORIES:
            (self.home / name).mkdir(mode=0o711, exist_ok=True)
        files = {
            "containers.conf": arguments.engine_settings(self.programs),
            "storage.conf": arguments.storage_settings(),
            "registries.conf": "unqualified-search-registries = []\n",
            "seccomp.json": json.dumps(seccomp.profile()),
            "conmon": self._monitor_script(),
        }
        for name, text in files.items():
            _put(self.home / name, text)

    def _monitor_script(self) -> str:
        """Podman asks conmon for its version at every command, which is answered without a detour."""
        conmon = shlex.quote(self.programs.conmon)
        python, monitor = shlex.quote(sys.executable), shlex.quote(str(_MONITOR))
        return (
            f'#!/bin/sh\n[ "$1" = --version ] && exec {conmon} --version\n'
            f'exec {python} -I -S {monitor} {conmon} "$@"\n'
        )

    def forget_other_boots(self) -> None:
        """Remove what earlier boots left. Blocking."""
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path != self.home:
                    shutil.rmtree(path)

    def forget(self) -> None:
        """Remove everything of this boot: podman may know no container any more. Blocking."""
        shutil.rmtree(self.home, ignore_errors=True)

    # Commands.

    async def begin(
        self,
        *commands: Sequence[str],
        launch: Mapping[str, Any] | None = None,
        enter: int | None = None,
        stdout: int = asyncio.subprocess.DEVNULL,
        stderr: int,
    ) -> asyncio.subprocess.Process:
        """Start podman's commands, one after the other, on a stage of their own or one that is there. They are
        a session of their own."""
        spec = stage_spec(self.home, commands, launch=launch, enter=enter)
        with processes.Descriptors() as held:
            spec_fd = held.keep(processes.anonymous_file(json.dumps(spec)))
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_STAGE), str(spec_fd)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(spec_fd, *(() if enter is None else (enter,))),
                cwd="/",
                env={},
                start_new_session=True,
            )

    async def ask(self, *asked: Sequence[str]) -> Answer:
        """Commands that are no sandbox's, and the words of the last. Raises Unanswered when they take too long."""
        pipe = asyncio.subprocess.PIPE
        commands = [(self.programs.podman, *command) for command in asked]
        process = await self.begin(*commands, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            raise Unanswered(f"podman {asked[0][0]} took longer than {COMMAND_SECONDS:.0f} s.") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Answer(process.returncode, output, errors)

    async def containers(self) -> list[Container]:
        """Every container with our label, whatever its state. Raises Unanswered."""
        answer = await self.ask(("ps", "--all", "--filter", f"label={LABEL}", "--format", "json"))
        try:
            if answer.status == 0:
                return [
                    Container(str(one["Labels"][LABEL]), int(one.get("Pid") or 0))
                    for one in json.loads(answer.output or b"[]")
                ]
        except (ValueError, KeyError, TypeError):
            pass
        raise Unanswered(f"podman cannot list its containers: {_words(answer)}")

    async def remove(self, name: str) -> None:
        """Remove a container until podman knows it no more. Raises Unanswered."""
        answer = Answer(0, b"", b"")
        for _ in range(REMOVE_TRIES):
            answer = await self.ask(
                ("rm", "--force", "--time", "0", "--ignore", name),
                ("ps", "--all", "--quiet", "--filter", f"label={LABEL}={name}"),
            )
            if answer.status == 0 and not answer.output:
                for path in (self.home / "pids").glob(f"{name}.*"):
                    path.unlink(missing_ok=True)
                return
        raise Unanswered(f"podman does not remove the container {name}: {_words(answer)}")

    # What it writes down of a container.

    def pid(self, name: str, kind: str) -> int:
        """Of a container's first process ("init") or of its monitor ("conmon"); 0: not written."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.home / "pids" / f"{name}.{kind}").read_text())
        return 0

    def _id(self, name: str) -> str:
        return (self.home / "pids" / f"{name}.id").read_text().strip()

    def exit_status(self, name: str) -> int | None:
        """As shells tell it; None when its monitor was killed before it could write it down."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.home / "libpod" / "exits" / self._id(name)).read_text())
        return None

    def configuration(self, name: str) -> dict[str, Any]:
        """What the OCI runtime was handed. Raises OSError, ValueError."""
        bundle = self.home / "graph" / "vfs-containers" / self._id(name) / "userdata"
        return dict(json.loads((bundle / "config.json").read_text()))


def _put(path: Path, text: str) -> None:
    """Whole or not at all: podman may be reading it for another sandbox."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_text() == text:
            return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o700)
    os.rename(file.name, path)


def stage_spec(
    home: Path,
    commands: Sequence[Sequence[str]],
    *,
    launch: Mapping[str, Any] | None = None,
    enter: int | None = None,
) -> dict[str, Any]:
    """The document that the stage reads."""
    return {
        "parent": os.getpid(),
        "home": str(home),
        "launch": launch,
        "enter": enter,
        "commands": [list(command) for command in commands],
        "environment": arguments.environment(),
    }


def _words(answer: Answer) -> str:
    said = answer.errors.decode("utf-8", "replace").strip()
    return said or f"it ended with status {answer.status}"
