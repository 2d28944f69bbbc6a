"""State that somebody else holds, or that is damaged: a controller says in one sentence why it does not start, and a
running one refuses what it cannot do, without harm to what is there."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.http import http_of
from support.installation import Installation

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    """A controller on its own."""
    with running(tmp_path / "one") as made:
        yield made


@contextmanager
def running(directory: Path, **settings: str) -> Iterator[Installation]:
    directory.mkdir()
    for path in (directory, *directory.parents[:2]):
        path.chmod(0o755)
    made = Installation(directory, settings=settings)
    try:
        made.start("controller")
        yield made
    finally:
        made.stop()


def why_not(installation: Installation) -> str:
    """What another start says, which must end with status 1, in one line, without a traceback."""
    ended = subprocess.run(
        [sys.executable, "-m", "ficc.controller"],
        env=installation.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = ended.stderr.strip().splitlines()
    assert (ended.returncode, len(said)) == (1, 1), ended.stderr
    assert said[0].startswith("controller: ")
    return said[0]


@contextmanager
def mounted(directory: Path) -> Iterator[None]:
    """A file system of its own over a directory, owned as the directory is."""
    owner = directory.stat()
    options = f"size=4m,mode=700,uid={owner.st_uid},gid={owner.st_gid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


# Held by another.


def test_a_second_controller_touches_nothing(installation: Installation) -> None:
    pid = installation.processes["controller"].pid
    before = installation.address_file.read_bytes()
    assert f"another controller (pid {pid}) runs on {installation.directory}" in why_not(installation)
    assert installation.address_file.read_bytes() == before
    assert installation.call("GET", "/models")["items"] == []
    installation.kill("controller")
    installation.start("controller")  # the lock of one that was killed holds nobody up


def test_a_second_controller_leaves_the_first_ones_unix_socket_alone(tmp_path: Path) -> None:
    address = {"FICC_SERVER_LISTEN": f"unix:{tmp_path}/api.sock"}
    with running(tmp_path / "one", **address) as installation:
        assert json.loads(installation.address_file.read_text())["origin"].startswith("unix:")
        inode = (tmp_path / "api.sock").stat().st_ino
        why_not(installation)
        assert (tmp_path / "api.sock").stat().st_ino == inode


def test_the_content_of_another_installation_is_refused_and_stays(
    installation: Installation, tmp_path: Path
) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"weights")
    installation.add_model(file, "weights")
    installation.kill("controller", signal.SIGTERM)
    content = installation.directory / "content"
    blobs = sorted(content.rglob("blobs/*/*"))
    stranger = Installation(tmp_path / "two", settings={"FICC_CONTENT_DIRECTORY": str(content)})
    said = why_not(stranger)
    assert "belongs to installation" in said
    assert str(content) in said
    assert sorted(content.rglob("blobs/*/*")) == blobs
    installation.start("controller")
    assert installation.call("GET", "/models")["items"][0]["state"] == "ready"


# Damaged.


@pytest.mark.parametrize("damage", ["garbage", "read-only"])
def test_a_database_that_cannot_be_used(installation: Installation, damage: str) -> None:
    installation.kill("controller", signal.SIGTERM)
    database = installation.directory / "controller" / "ficc.sqlite"
    if damage == "garbage":
        database.write_bytes(os.urandom(8192))
        assert "file is not a database" in why_not(installation)
    elif os.geteuid() == 0:  # the controller's account is another, then
        for path in (database, database.parent):
            os.chown(path, 0, 0)
            path.chmod(0o555)
        assert "readonly database" in why_not(installation)


def test_an_emptied_database_does_not_take_over_the_content(installation: Installation) -> None:
    """A new installation would sweep every blob away."""
    installation.kill("controller", signal.SIGTERM)
    (installation.directory / "controller" / "ficc.sqlite").unlink()
    assert "belongs to installation" in why_not(installation)


@pytest.mark.root
def test_content_that_became_read_only(installation: Installation) -> None:
    installation.kill("controller", signal.SIGTERM)
    content = installation.directory / "content"
    with mounted(content):
        installation.start("controller")
        subprocess.run(["mount", "-o", "remount,ro", str(content)], check=True)
        data = b"weights"
        file = {"name": "a.gguf", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        http = http_of(installation)
        model = http("POST", "/models", {"name": "a", "format": "gguf", "files": [file]}).ok(201)
        refused = http.octets(model["id"], 0, 0, data)
        assert (refused.status, refused.code) == (503, "content_unavailable")
        assert "Read-only file system" in refused.json["error"]["message"]
        subprocess.run(["mount", "-o", "remount,rw", str(content)], check=True)
        assert http.octets(model["id"], 0, 0, data).ok()["state"] == "verified"

        subprocess.run(["mount", "-o", "remount,ro", str(content)], check=True)
        installation.kill("controller", signal.SIGTERM)
        assert "Read-only file system" in why_not(installation)
