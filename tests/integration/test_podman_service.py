"""The main job by the second provider: the real llama.cpp with SmolLM2 in a container of podman's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from ficc.executor.providers.podman.provider import Podman
from support.commands import BIN
from support.executor import leftovers
from support.installation import Installation

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("ficc")
    with Installation(directory, images=images, settings={"FICC_EXECUTOR_PROVIDER": "podman"}) as made:
        yield made


def test_a_service_in_podman(installation: Installation, model_file: Path) -> None:
    """From a model to an answer, and to nothing that is left; in the same image that bubblewrap runs."""
    runtime = installation.runtime()
    assert (runtime["provider"], runtime["package_digest"]) == ("podman", Podman().package_digest)
    model = installation.add_model(model_file, "smollm2", ["chat"])
    made = installation.call("POST", "/inference", installation.specification("assistant", model["id"]))
    record = installation.settled(made["id"], "ready", "failed")
    assert record["state"] == "ready", record["reason"]

    token = installation.call("POST", f"/inference/{made['id']}/tokens", {"lifetime": 3600})
    client = OpenAI(base_url=token["base_url"], api_key=token["token"], max_retries=0)
    answer = client.chat.completions.create(
        model="assistant", messages=[{"role": "user", "content": "Say hello."}], max_tokens=16, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0

    attempt_id = record["replicas"][0]["attempt_id"]
    executor = psutil.Process(installation.processes["executor"].pid)
    (monitor,) = (one for one in executor.children() if one.name() == "conmon")
    assert attempt_id in " ".join(monitor.cmdline())
    assert leftovers(attempt_id) != []

    revision = installation.call("GET", f"/inference/{made['id']}")["revision"]
    installation.call("POST", f"/inference/{made['id']}/control/stop", {"revision": revision})
    installation.settled(made["id"], "stopped")
    installation.until(lambda: leftovers(attempt_id) == [], "nothing of the attempt is left")
    installation.until(lambda: not monitor.is_running(), "its monitor is gone")


def test_the_doctor_says_what_podman_lacks(installation: Installation, tmp_path: Path) -> None:
    """`--check`, whose findings `ficc doctor` shows: with it installed nothing, without it what to install."""
    environment = dict(installation.environment)
    found = check(environment)
    assert found["unenforceable"] == {}
    found = check({**environment, "PATH": str(tmp_path)})
    assert "install podman" in found["unenforceable"]["memory_bytes"]


def test_the_doctor_looks_for_the_provider_that_is_chosen(installation: Installation) -> None:
    words = [str(BIN / "ficc"), "doctor", "--json"]
    said = subprocess.run(words, env=installation.environment, capture_output=True, check=False)
    checks = {one["check"]: one for one in json.loads(said.stdout)["checks"]}
    assert checks["podman"]["ok"]
    assert checks["limits"]["ok"]
    assert "bwrap" not in checks


def check(environment: dict[str, str]) -> dict[str, dict[str, str]]:
    said = subprocess.run(
        [sys.executable, "-m", "ficc.executor", "--check"], env=environment, capture_output=True, check=True
    )
    report: dict[str, dict[str, str]] = json.loads(said.stdout)
    return report
