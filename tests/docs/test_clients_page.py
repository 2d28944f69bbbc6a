"""The page of the clients is of the releases that are locked, and says of each what its run said."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from clients.environments import CLIENTS
from support import scripts

SCRIPT = scripts.SCRIPTS / "clients_page.py"
STEPS = ("chat", "stream", "embeddings", "error", "abort")
BY_NAME = {client.name: client for client in CLIENTS}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.load("clients_page")


def results(name: str, *failed: tuple[str, str]) -> dict[str, Any]:
    """Of a client whose every step went well but these."""
    steps = {step for step in STEPS if step not in BY_NAME[name].lacks}
    passed = {url: {step: (url, step) not in failed for step in steps} for url in ("service", "project")}
    return {name: {"version": BY_NAME[name].version, "passed": passed}}


def test_the_page_has_every_client_in_the_release_that_is_locked() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_failed_and_what_a_client_lacks_is_shown(script: ModuleType) -> None:
    found = results("llm", ("service", "abort"))
    page = script.render([BY_NAME["llm"]], found)
    row = f"| `llm` (Python) | {BY_NAME['llm'].version} | yes | yes | - | yes | **no** (service) | service, project |"
    assert row in page


def test_a_client_of_another_release_was_not_tried(script: ModuleType) -> None:
    client = BY_NAME["litellm"]
    found = results("litellm")
    assert script.stale([client], found) == []
    found["litellm"]["version"] = "0.1"
    assert script.stale([client], found) == ["litellm"]
    assert script.stale([client], {}) == ["litellm"]


def test_a_client_whose_steps_were_tried_in_part_was_not_tried(script: ModuleType) -> None:
    found = results("litellm")
    del found["litellm"]["passed"]["project"]["abort"]
    assert script.stale([BY_NAME["litellm"]], found) == ["litellm"]


def test_no_lock_names_the_registry_that_it_was_made_with() -> None:
    for lock in {client.lock for client in CLIENTS}:
        named = "resolved" if lock.suffix == ".json" else "://"
        assert named not in lock.read_text(), lock
