"""The same tree gives the same bytes, and what is written is read back whole."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ficc.domain.errors import Refused
from ficc.images.layout import machine_architecture
from ficc.images.store import MOUNT_POINTS, ImageStore
from ficc.images.writer import write_layout
from support.oci_layouts import verified

GOLDEN = "sha256:d4af72f9ac8d1761769042176b7dc28394f9b109d93f47147b7b981bda4495a1"
"""Of the tree below, for amd64. It changes only when every image's digest changes: say so in the notes."""


def make_tree(root: Path) -> Path:
    for point in MOUNT_POINTS:
        (root / point).mkdir(parents=True)
    for path, content, mode in (
        ("usr/bin/engine", b"#!/bin/sh\nexit 0\n", 0o755),
        ("usr/share/doc/copyright", b"free\n", 0o644),
        ("usr/lib/" + "n" * 90 + "/" + "m" * 120, b"long name", 0o644),
        ("usr/lib/größe", b"not ASCII", 0o600),
    ):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
    os.link(root / "usr/bin/engine", root / "usr/bin/other-name")
    (root / "bin").symlink_to("usr/bin")
    (root / "absolute").symlink_to("/usr/bin")
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o755)
    return root


def write(tree: Path, target: Path, architecture: str | None = None) -> str:
    return write_layout(
        tree,
        target,
        name="tests/golden",
        entrypoint=["/usr/bin/engine"],
        environment={"PATH": "/usr/bin", "LANG": "C.UTF-8"},
        labels={"b": "2", "a": "1"},
        architecture=architecture,
    )


def test_the_golden_digest(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    assert write(tree, tmp_path / "layout", architecture="amd64") == GOLDEN


def test_owner_times_and_order_of_creation_do_not_matter(tmp_path: Path) -> None:
    first = make_tree(tmp_path / "first")
    second = tmp_path / "second"
    shutil.copytree(first, second, symlinks=True)
    for name in ("usr/bin/other-name",):  # copytree made it a file of its own
        (second / name).unlink()
        os.link(second / "usr/bin/engine", second / name)
    for folder, _, files in os.walk(second):
        for name in [*files, ""]:
            os.utime(os.path.join(folder, name), (1, 1), follow_symlinks=False)
            if os.geteuid() == 0:
                os.chown(os.path.join(folder, name), 1234, 1234, follow_symlinks=False)
    assert write(first, tmp_path / "a") == write(second, tmp_path / "b")
    assert _files(tmp_path / "a") == _files(tmp_path / "b")


def test_another_process_with_another_locale_and_umask_writes_the_same(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    code = (
        "import os, sys; from pathlib import Path; from ficc.images.writer import write_layout; os.umask(0o077)\n"
        "print(write_layout(Path(sys.argv[1]), Path(sys.argv[2]), name='tests/golden',"
        " entrypoint=['/usr/bin/engine'], environment={'LANG': 'C.UTF-8', 'PATH': '/usr/bin'},"
        " labels={'a': '1', 'b': '2'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tree), str(tmp_path / "theirs")],
        env={**os.environ, "LC_ALL": "C", "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == write(tree, tmp_path / "ours")


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "usr/bin/engine").write_bytes(b"#!/bin/sh\nexit 1\n"),
        lambda tree: (tree / "usr/bin/engine").chmod(0o744),
        lambda tree: (tree / "usr/bin/more").touch(),
        lambda tree: (tree / "tmp").chmod(0o777),
        lambda tree: ((tree / "bin").unlink(), (tree / "bin").symlink_to("/usr/bin")),
        lambda tree: (tree / "usr/bin/other-name").unlink(),
    ],
)
def test_what_an_engine_could_see_matters(tmp_path: Path, change: object) -> None:
    tree = make_tree(tmp_path / "tree")
    before = write(tree, tmp_path / "before")
    assert callable(change)
    change(tree)
    assert write(tree, tmp_path / "after") != before


def test_a_tree_survives_writing_and_importing(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    digest = write(tree, tmp_path / "layout")
    assert verified(tmp_path / "layout").image_digest == digest
    store = ImageStore(tmp_path / "store")
    record = store.import_layout(tmp_path / "layout")
    assert (record.image_digest, record.name) == (digest, "tests/golden")
    assert record.environment == {"LANG": "C.UTF-8", "PATH": "/usr/bin"}
    root = store.root_of(digest)
    assert _files(root) == _files(tree)
    assert (root / "usr/bin/engine").stat().st_ino == (root / "usr/bin/other-name").stat().st_ino
    assert write(root, tmp_path / "again") == digest, "what was extracted packs to the same image"


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is the other reader")
def test_skopeo_reads_what_is_written(tmp_path: Path) -> None:
    digest = write(make_tree(tmp_path / "tree"), tmp_path / "layout")
    done = subprocess.run(
        ["skopeo", "inspect", f"oci:{tmp_path / 'layout'}"], capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert (seen["Digest"], seen["Architecture"]) == (digest, machine_architecture())


@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_what_an_image_may_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    tree = make_tree(tmp_path / "tree")
    if kind == "fifo":
        os.mkfifo(tree / "strange")
    else:
        here = socket.socket(socket.AF_UNIX)
        monkeypatch.chdir(tree)  # a socket's path is short
        here.bind("strange")
        here.close()
    with pytest.raises(Refused, match="strange is a device, a fifo or a socket"):
        write(tree, tmp_path / "layout")


def _files(root: Path) -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes()
    return found
