"""The console in Debian's Chromium, against a real installation with the real model; and its pure parts in Node.

Needs `chromium`, `node` and `npm`; without them these tests are skipped, and in CI that is a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from ficc.client.api import Unreachable
from ficc.controller.api import shapes
from support.installation import Installation
from support.model import CACHE

HERE = Path(__file__).parent
CONSOLE = HERE.parents[1] / "src" / "ficc" / "console"
SCREENSHOTS = CACHE / "screenshots"
NPM_FILES = ("package.json", "package-lock.json", ".npmrc")
ANSWER_SECONDS = 60

pytestmark = pytest.mark.timeout(600)


def program(*names: str) -> str:
    for name in names:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip(f"{names[0]} is not installed")


@pytest.fixture(scope="module")
def node() -> str:
    return program("node")


@pytest.fixture(scope="module")
def modules() -> Path:
    """Where playwright-core is, installed as the lock has it."""
    npm, folder = program("npm"), CACHE / "browser"
    wanted = {name: (HERE / name).read_text() for name in NPM_FILES}
    if (folder / "installed.json").exists() and json.loads((folder / "installed.json").read_text()) == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        (folder / name).write_text(text)
    done = subprocess.run([npm, "ci"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm could not install what the browser test needs:\n{done.stderr}")
    (folder / "installed.json").write_text(json.dumps(wanted))
    return folder


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Installation]:
    """One that keeps its address when its controller is started again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    made = Installation(
        tmp_path_factory.mktemp("ficc"), images=images, settings={"FICC_SERVER_LISTEN": listen}
    )
    try:
        made.start()
        yield made
    finally:
        made.stop()


def furnish(installation: Installation, model_file: Path, folder: Path) -> None:
    """A service that answers, one whose engine cannot load its model, and a model that is half here."""
    model = installation.add_model(model_file, "smollm2")
    spec = installation.specification("assistant", model["id"], context=2048)
    installation.settled(installation.call("POST", "/inference", spec)["id"], "ready")
    truncated = folder / "truncated.gguf"
    truncated.write_bytes(model_file.read_bytes()[: 4 << 20])
    broken = installation.add_model(truncated, "broken", ["embeddings"])
    spec = installation.specification("broken", broken["id"])
    installation.settled(installation.call("POST", "/inference", spec)["id"], "failed")
    half = {
        "name": "half",
        "format": "gguf",
        "files": [{"name": "half.gguf", "bytes": 4 << 20, "sha256": "5" * 64}],
    }
    made = installation.call("POST", "/models", half)
    installation.run(lambda api: api.upload(made["id"], 0, 0, bytes(2 << 20)))


def bring_back(installation: Installation) -> None:
    """Start the controller again, and wait until it answers and its node is there."""

    def answers() -> bool:
        try:
            return bool(installation.node())
        except Unreachable:
            return False

    installation.start("controller")
    installation.until(answers, "the controller answers")


def test_the_console(
    installation: Installation, model_file: Path, node: str, modules: Path, tmp_path: Path
) -> None:
    chromium = program("chromium", "chromium-browser")
    settings = {
        "origin": installation.origin,
        "token": installation.token,
        "chromium": chromium,
        "modules": str(modules),
        "screenshots": str(SCREENSHOTS),
    }
    errands = {
        "furnish": lambda: furnish(installation, model_file, tmp_path),
        "kill the controller": lambda: installation.kill("controller"),
        "start the controller": lambda: bring_back(installation),
    }
    walk = subprocess.Popen(
        [node, str(HERE / "console.mjs")],
        env={**os.environ, "CONSOLE_TEST": json.dumps(settings)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert walk.stdin is not None
    assert walk.stdout is not None
    said = []
    try:
        for line in walk.stdout:
            if line.startswith("@"):
                errands[line[1:].strip()]()
                print("done", file=walk.stdin, flush=True)
            else:
                print(line, end="", flush=True)
                said.append(line)
        status = walk.wait(ANSWER_SECONDS)
    finally:
        walk.kill()
        walk.wait()
    assert status == 0, "".join(said)


@pytest.fixture
def console_files(tmp_path: Path) -> Path:
    """The console's files where Node takes them for the modules that they are."""
    copied = Path(shutil.copytree(CONSOLE, tmp_path / "console"))
    (copied / "package.json").write_text('{"type": "module"}')
    return copied


def test_the_pure_parts_of_the_console(node: str, console_files: Path) -> None:
    """What decides without a browser: formats, words, the parser of events, contrast."""
    done = subprocess.run(
        [node, "--test", str(HERE / "pure.test.mjs")],
        env={**os.environ, "CONSOLE_FILES": str(console_files)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_state_has_its_words(node: str, console_files: Path) -> None:
    script = f"import * as all from {json.dumps((console_files / 'messages.js').as_uri())};" + (
        "console.log(JSON.stringify(Object.fromEntries(Object.entries(all)"
        ".map(([name, value]) => [name, Array.isArray(value) ? value : Object.keys(value)]))));"
    )
    done = subprocess.run(
        [node, "--input-type=module", "--eval", script], capture_output=True, text=True, check=True
    )
    words = {name: set(keys) for name, keys in json.loads(done.stdout).items()}

    def literals(shape: type, name: str) -> set[str]:
        annotation = shape.model_fields[name].annotation  # type: ignore[attr-defined]
        found = get_args(annotation)
        return {text for one in found for text in get_args(one) or (one,) if isinstance(text, str)}

    assert words["modelStates"] == literals(shapes.Model, "state")
    assert words["fileStates"] == literals(shapes.ModelFile, "state")
    assert words["serviceStates"] == literals(shapes.Service, "state")
    assert words["desiredStates"] == literals(shapes.Service, "desired")
    assert words["replicaStates"] == literals(shapes.Replica, "state")
    assert words["outcomes"] == literals(shapes.Replica, "outcome")
