"""The clients of the matrix, and an environment for each: nothing of one is seen by another, nor by the tests.

A Python client has a virtual environment from its lock in `requirements/`, save the one that the tests use
themselves; the JavaScript clients share a directory from `package-lock.json`, with Node from a lock too, as they want
a later one than distributions have.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.model import CACHE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
REQUIREMENTS = HERE / "requirements"
FOLDER = CACHE / "clients"
NPM_FILES = ("package.json", "package-lock.json", ".npmrc")
NPM_LOCK = HERE / "package-lock.json"
LOCK_OF_THE_TESTS = ROOT / "requirements" / "check.lock"


@dataclass(frozen=True, kw_only=True)
class Client:
    """`program` drives the release of `package` that `lock` has. `unknown_model` and `wrong_token` are the errors that
    its users are to catch then, `aborts` is how they leave a stream, and `lacks` are steps that it has nothing for."""

    name: str
    package: str
    program: str
    aborts: str
    unknown_model: str = "openai.NotFoundError"
    wrong_token: str = "openai.AuthenticationError"
    lacks: frozenset[str] = frozenset()
    in_ci: bool = False
    of_the_tests: bool = False
    """The release that the tests themselves use."""

    @property
    def in_node(self) -> bool:
        return self.program.endswith(".mjs")

    @property
    def lock(self) -> Path:
        if self.in_node:
            return NPM_LOCK
        return LOCK_OF_THE_TESTS if self.of_the_tests else REQUIREMENTS / f"{self.name}.lock"

    @property
    def version(self) -> str:
        """As it is locked."""
        if self.in_node:
            packages = json.loads(self.lock.read_text())["packages"]
            return str(packages[f"node_modules/{self.package}"]["version"])
        found = re.search(rf"^{re.escape(self.package)}==(\S+)", self.lock.read_text(), re.MULTILINE)
        assert found is not None, f"{self.lock} has no {self.package}"
        return found[1]

    def command(self) -> list[str]:
        """What runs its program, once its environment is made."""
        if self.in_node:
            return javascript(self.program)
        python = Path(sys.executable) if self.of_the_tests else virtual_environment(self.lock)
        return [str(python), str(PROGRAMS / self.program)]


CLIENTS = (
    Client(
        name="openai",
        package="openai",
        program="openai_python.py",
        aborts="`stream.close()`",
        in_ci=True,
        of_the_tests=True,
    ),
    Client(
        name="openai-2",
        package="openai",
        program="openai_python.py",
        aborts="`stream.close()`",
        in_ci=True,
    ),
    Client(
        name="openai-npm",
        package="openai",
        program="openai.mjs",
        aborts="`stream.controller.abort()`",
        unknown_model="NotFoundError",
        wrong_token="AuthenticationError",
        in_ci=True,
    ),
    Client(
        name="ai-sdk",
        package="@ai-sdk/openai-compatible",
        program="ai_sdk.mjs",
        aborts="`abortSignal`",
        unknown_model="APICallError",
        wrong_token="APICallError",
    ),
    Client(
        name="langchain-openai",
        package="langchain-openai",
        program="langchain_client.py",
        aborts="`close()` of the generator",
    ),
    Client(
        name="litellm",
        package="litellm",
        program="litellm_client.py",
        aborts="`stream.close()`",
        unknown_model="litellm.exceptions.NotFoundError",
        wrong_token="litellm.exceptions.AuthenticationError",
    ),
    Client(
        name="pydantic-ai",
        package="pydantic-ai-slim",
        program="pydantic_ai_client.py",
        aborts="`result.cancel()`",
        unknown_model="pydantic_ai.exceptions.ModelHTTPError",
        wrong_token="pydantic_ai.exceptions.ModelHTTPError",
    ),
    Client(
        name="llama-index",
        package="llama-index-llms-openai-like",
        program="llama_index_client.py",
        aborts="cancelling the task",
    ),
    Client(
        name="llm",
        package="llm",
        program="llm_client.py",
        aborts="cancelling the task",
        lacks=frozenset({"embeddings"}),
    ),
)


def virtual_environment(lock: Path) -> Path:
    """The Python that has what a lock asks for, and that only."""
    folder = FOLDER / lock.stem

    def make() -> None:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--require-hashes", "--only-binary", ":all:", "-r", str(lock)])

    _once(folder, [lock], make)
    return folder / "bin" / "python"


def javascript(program: str) -> list[str]:
    """What runs a program of the JavaScript clients: a copy beside their packages, where Node looks for them."""
    binaries = virtual_environment(REQUIREMENTS / "node.lock").parent
    folder = FOLDER / "npm"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in NPM_FILES:
            (folder / name).write_bytes((HERE / name).read_bytes())
        _run([str(binaries / "npm"), "ci", "--ignore-scripts"], folder)

    _once(folder, [HERE / name for name in NPM_FILES], make)
    for source in PROGRAMS.glob("*.mjs"):
        (folder / source.name).write_bytes(source.read_bytes())
    return [str(binaries / "node"), str(folder / program)]


def _once(folder: Path, sources: Sequence[Path], make: Callable[[], None]) -> None:
    """Make what a folder is to have, unless it was made from the same sources."""
    stamp = folder / "made-from.json"
    wanted = {source.name: source.read_text() for source in sources}
    if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
        make()
        stamp.write_text(json.dumps(wanted))


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
