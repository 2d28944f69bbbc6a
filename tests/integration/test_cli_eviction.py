"""`ficc model remove --evict` and `ficc content`: what they print, ask and do."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.http import Http, projects_of
from support.installation import Installation
from support.rows import random_bytes, sha256
from support.uploads import Stream, blobs, claimed, piece, registered

FICC = str(Path(sys.executable).parent / "ficc")


class Shell:
    """Runs `ficc` as somebody of a project would."""

    def __init__(self, installation: Installation, api: Http) -> None:
        self.environment = {
            **os.environ,
            "FICC_STATE_DIRECTORY": str(installation.directory),
            "FICC_URL": installation.origin,
            "FICC_TOKEN": str(api.token),
            "NO_COLOR": "1",
        }

    def __call__(self, *words: str, status: int = 0, answer: str | None = None) -> tuple[str, str]:
        """Standard output and error. With an answer there is a terminal that gives it."""
        ours, theirs = pty.openpty()
        try:
            if answer is not None:
                os.write(ours, f"{answer}\n".encode())
            done = subprocess.run(
                [FICC, *words],
                env=self.environment,
                stdin=subprocess.DEVNULL if answer is None else theirs,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            os.close(ours)
            os.close(theirs)
        assert done.returncode == status, (words, done)
        return done.stdout, done.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json")[0])


@pytest.fixture
def somebody(made: Installation, request: pytest.FixtureRequest) -> Http:
    """Of a project of the test's own."""
    return projects_of(made, request.node.name)[request.node.name]


@pytest.fixture
def ficc(made: Installation, somebody: Http) -> Shell:
    return Shell(made, somebody)


def ready(api: Http, data: bytes, name: str) -> str:
    model_id = registered(api, data, name=name)
    piece(api, model_id, 0, data).ok()
    return model_id


def test_a_model_is_evicted_once_somebody_agreed_to_the_numbers(
    made: Installation, somebody: Http, ficc: Shell
) -> None:
    shared, own = random_bytes(5000), random_bytes(3000)
    ready(somebody, shared, "other")
    model_id = registered(somebody, shared, own, name="weights")
    piece(somebody, model_id, 0, own, index=1).ok()

    _, said = ficc("model", "remove", "weights", "--evict", status=2)  # nobody to ask
    assert said.startswith("Error: ")
    _, said = ficc("model", "remove", "weights", "--evict", status=1, answer="n")
    assert "Remove weights and free 3 kB? 5 kB that others share stay. [y/N]" in said
    assert somebody("GET", f"/models/{model_id}").ok()["state"] == "ready"

    printed, said = ficc("model", "remove", "weights", "--evict", answer="y")
    assert not printed.strip()
    assert said.endswith("Removed. 3 kB freed, 5 kB kept.\n")
    assert sha256(own) not in blobs(made)
    assert ficc.json("model", "remove", "other", "--evict", "--yes") == {
        "removed": True,
        "bytes_freed": 5000,
        "bytes_retained_shared": 0,
    }


def test_what_is_forbidden_is_said_instead_of_asked(made: Installation, somebody: Http, ficc: Shell) -> None:
    data = random_bytes(100)
    model_id = registered(somebody, data, name="weights")
    with Stream(somebody, model_id, 0, 100) as stream:
        stream.send(data[:50])
        claimed(made, data)
        _, said = ficc("model", "remove", "weights", "--evict", status=1, answer="y")
        assert "model_busy" in said
        assert "[y/N]" not in said
        stream.send(data[50:])
        assert stream.answer()[1]["state"] == "verified"


def test_content_is_listed_and_pruned(made: Installation, somebody: Http, ficc: Shell) -> None:
    assert ficc.json("content", "list") == {"items": [], "next": None}
    assert "No content yet" in ficc("content", "list")[1]
    left, kept = random_bytes(4000), random_bytes(600)
    ready(somebody, left, "left")
    ready(somebody, kept, "kept")
    ficc("model", "remove", "left", "--yes")
    listed = ficc.json("content", "list")["items"]
    assert [(item["sha256"], len(item["references"])) for item in listed] == [
        (sha256(kept), 1),
        (sha256(left), 0),
    ]
    table, _ = ficc("content", "list")
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["SHA256", "STATE"],
        [sha256(kept)[:16], "blob"],
        [sha256(left)[:16], "blob"],
    ]

    _, said = ficc("content", "prune", "--dry-run")
    assert said.startswith("Would remove 1 contents that no model has: 4 kB freed, 0 B kept")
    expected = {"count": 1, "bytes_freed": 4000, "bytes_retained_shared": 0}
    assert ficc.json("content", "prune", "--dry-run") == {"dry_run": True, **expected}
    ficc("content", "prune", status=2)
    _, said = ficc("content", "prune", status=1, answer="n")
    assert "Remove 1 contents that no model has: 4 kB freed, 0 B kept by other projects? [y/N]" in said
    assert sha256(left) in blobs(made)
    _, said = ficc("content", "prune", answer="y")
    assert said.rstrip().endswith(
        "Removed 1 contents that no model has: 4 kB freed, 0 B kept by other projects."
    )
    assert sha256(left) not in blobs(made)
    nothing = {"count": 0, "bytes_freed": 0, "bytes_retained_shared": 0}
    assert ficc.json("content", "prune", "--yes") == {"dry_run": False, **nothing}
