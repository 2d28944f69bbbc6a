"""`make demo` as a process: whatever ends it, nothing of it goes on; and it touches nothing that is not its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from support.commands import BIN, Command, eventually

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ROOT = Path(__file__).parents[2]


class Demo:
    """Runs of the demonstration on one state directory."""

    def __init__(self, directory: Path, model_file: Path, images: Path) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.model_file = model_file
        self.runs: list[Command] = []
        (self.state / "executor").mkdir(parents=True)
        (self.state / "executor" / "images").symlink_to(images)
        self.environment = {"FICC_SERVER_LISTEN": "127.0.0.1:0", "FICC_CONTENT_RESERVE_BYTES": "0"}

    def start(self, **environment: str) -> Command:
        script = str(ROOT / "scripts" / "demo.py")
        options = ["--model", str(self.model_file), "--state-directory", str(self.state)]
        log = self.directory / f"demo-{len(self.runs)}.log"
        run = Command([sys.executable, script, *options], log, {**self.environment, **environment})
        self.runs.append(run)
        return run

    def up(self, **environment: str) -> Command:
        """A run that has come to its end and stays."""
        run = self.start(**environment)
        eventually(
            lambda: "It stays up" in run.said or run.process.poll() is not None, "it answered", seconds=180
        )
        assert run.process.poll() is None, run.said
        return run

    def ficc(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment: Mapping[str, str] = {**os.environ, "FICC_STATE_DIRECTORY": str(self.state)}
        done = subprocess.run(
            [str(BIN / "ficc"), *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def services(self) -> dict[str, str]:
        """States by alias."""
        items = json.loads(self.ficc("service", "list", "--json").stdout)["items"]
        return {item["alias"]: item["state"] for item in items}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, model_file: Path, images: Path) -> Iterator[Demo]:
    made = Demo(tmp_path_factory.mktemp("demo"), model_file, images)
    yield made
    for run in made.runs:
        run.end()


def test_it_ends_with_everything_and_leaves_others_services_alone(demo: Demo) -> None:
    # Killed, it cannot clear up; `ficc up` notices and ends all the same.
    run = demo.up()
    family = run.family()
    assert any("llama" in " ".join(process.cmdline()) for process in family)
    run.process.kill()
    assert not psutil.wait_procs(family, timeout=90)[1]

    # The next run replaces what that one left, and a service of the user's fits beside it.
    run = demo.up()
    assert demo.services() == {"assistant": "ready"}
    model = json.loads(demo.ficc("model", "list", "--json").stdout)["items"][0]["manifest"]["name"]
    demo.ficc("service", "create", "mine", "--model", model)
    family = run.family()
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(120) == 0
    assert not psutil.wait_procs(family, timeout=30)[1]

    # The user's service is still there, and wins its place.
    run = demo.up()
    assert set(demo.services()) == {"assistant", "mine"}
    eventually(lambda: demo.services()["mine"] == "ready", "the user's service is up again")
    family = run.family()

    # A second demonstration beside a running one says so, and changes nothing.
    other = demo.start()
    assert other.process.wait(120) == 1
    assert f"ficc already runs on {demo.state} (pid " in other.said
    assert demo.services() == {"assistant": "ready", "mine": "ready"}

    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(120) == 0
    assert not psutil.wait_procs(family, timeout=30)[1]
    check_what_it_says(demo, run.said)
    check_a_refusal(demo)


def check_what_it_says(demo: Demo, said: str) -> None:
    """One link, one base URL, and what makes the commands work elsewhere before the first of them."""
    assert said.count("#code=") == 1
    assert "(one use, ten minutes; another: ficc open)" in said
    assert said.count("Base URL") == 1
    assert "/api/v1/openai/v1\n" in said
    pasted = next(line for line in said.splitlines() if line.startswith("export "))
    assert said.index(pasted) < said.index("$ ficc")
    shell = f"{pasted}; command -v ficc; echo $FICC_STATE_DIRECTORY"
    clean = {"PATH": "/usr/bin:/bin"}
    found = subprocess.run(["bash", "-c", shell], env=clean, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [str(BIN / "ficc"), str(demo.state)]


def check_a_refusal(demo: Demo) -> None:
    """Where the user's services hold everything, the demonstration says who holds what, and what to do."""
    up = Command(
        [str(BIN / "ficc"), "up"],
        demo.directory / "up.log",
        {**demo.environment, "FICC_STATE_DIRECTORY": str(demo.state)},
    )
    try:
        eventually(lambda: "Console" in up.said, "ficc up is up")
        eventually(lambda: demo.services()["mine"] == "ready", "the user's service is up again")
        cores = json.loads(demo.ficc("node", "list", "--json").stdout)["items"][0]["available"]["cpu_millis"]
        model = json.loads(demo.ficc("model", "list", "--json").stdout)["items"][0]["manifest"]["name"]
        rest = ("--model", model, "--cpu-millis", str(cores))
        demo.ficc("service", "create", "all", *rest, "--no-wait")
        refused = demo.ficc("service", "create", "more", "--model", model, status=1)
        assert not refused.stdout
        assert refused.stderr.startswith("Error: Does not fit on ")
        assert "all (" in refused.stderr
        assert "holds" in refused.stderr
        assert "ficc service stop all" in refused.stderr
        as_json = demo.ficc("service", "preview", "more", "--model", model, "--json", status=1)
        assert not as_json.stdout
        error = json.loads(as_json.stderr)["error"]
        assert error["code"] == "does_not_fit"
        assert not error["preview"]["accepted"]
        assert {"alias": "all", "limits": {"cpu_millis": cores}} in error["holders"]
    finally:
        up.end()
    run = demo.start()
    assert run.process.wait(180) == 1
    assert "Error: Does not fit on " in run.said
    assert "ficc service stop all" in run.said
