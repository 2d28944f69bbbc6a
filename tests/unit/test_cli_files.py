"""Local files on their way into the store: hashed as they are, and copied so that nobody can change them later."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from ficc.cli import files


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    folder = tmp_path / "incoming"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(os.urandom(files.BLOCK_BYTES * 2 + 17))
    return path


def test_a_file_is_hashed_and_progress_told(source: Path) -> None:
    told: list[int] = []
    assert files.sha256(source, told.append) == hashlib.sha256(source.read_bytes()).hexdigest()
    assert told == [files.BLOCK_BYTES, files.BLOCK_BYTES * 2, files.BLOCK_BYTES * 2 + 17]


def test_a_placed_file_is_a_copy_of_its_own(source: Path, incoming: Path) -> None:
    data = source.read_bytes()
    told: list[int] = []
    first, second = (files.place(source, incoming, told.append) for _ in range(2))
    assert first != second
    assert told[-1] == len(data)
    for name in (first, second):
        placed = incoming / name
        assert placed.read_bytes() == data
        assert placed.stat().st_mode & 0o777 == 0o600
        assert (placed.stat().st_nlink, source.stat().st_nlink) == (1, 1)
        assert placed.stat().st_ino != source.stat().st_ino
    with source.open("r+b") as file:
        file.write(b"changed")
    assert (incoming / first).read_bytes() == data


def test_a_file_of_no_bytes_is_placed(tmp_path: Path, incoming: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert (incoming / files.place(empty, incoming, lambda done: None)).read_bytes() == b""


def test_a_link_is_placed_as_what_it_leads_to(source: Path, tmp_path: Path, incoming: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    placed = incoming / files.place(link, incoming, lambda done: None)
    assert not placed.is_symlink()
    assert placed.read_bytes() == source.read_bytes()


def test_a_copy_that_is_given_up_leaves_nothing(source: Path, incoming: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.place(source, incoming, interrupt)
    assert list(incoming.iterdir()) == []


def test_a_file_that_cannot_be_read_leaves_nothing(tmp_path: Path, incoming: Path) -> None:
    with pytest.raises(OSError):
        files.place(tmp_path / "nothing", incoming, lambda done: None)
    with pytest.raises(IsADirectoryError):
        files.place(tmp_path, incoming, lambda done: None)
    assert list(incoming.iterdir()) == []


@pytest.mark.root
def test_root_gives_the_copy_to_the_store(source: Path, incoming: Path) -> None:
    os.chown(incoming, 12345, 12346)
    placed = incoming / files.place(source, incoming, lambda done: None)
    assert (placed.stat().st_uid, placed.stat().st_gid) == (12345, 12346)
