"""Outputs: what a payload left is copied within bounds, whatever it put where its files should be."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ficc.domain.errors import Refused
from ficc.executor import logs, outputs
from ficc.executor.outputs import Outputs, Piece
from ficc.executor.providers.safe_files import open_regular

MIB = 1 << 20


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    (tmp_path / "secret").write_text("of the host")
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Outputs:
    return Outputs(tmp_path / "outputs")


def opener(scratch: Path) -> Callable[[str], int]:
    def open_file(name: str) -> int:
        fd = os.open(scratch, os.O_PATH | os.O_DIRECTORY)
        try:
            return open_regular(fd, name)
        finally:
            os.close(fd)

    return open_file


def whole(kept: Outputs, name: str, attempt_id: str = "a") -> bytes:
    return kept.read(attempt_id, name, 0, outputs.READ_BYTES_MAX).data


def refused(kept: Outputs, name: str, attempt_id: str = "a") -> str:
    with pytest.raises(Refused) as caught:
        kept.read(attempt_id, name, 0, 1)
    assert caught.value.code == "not_found"
    return caught.value.message


def test_files_are_kept_by_their_names_and_read_in_parts(scratch: Path, kept: Outputs) -> None:
    (scratch / "deep").mkdir()
    (scratch / "deep" / "result.txt").write_bytes(b"0123456789")
    (scratch / "empty").touch()
    kept.collect("a", ["deep/result.txt", "empty"], opener(scratch), MIB)
    assert kept.read("a", "deep/result.txt", 2, 3) == Piece(b"234", 2, 10, truncated=False)
    assert kept.read("a", "deep/result.txt", 10, 3) == Piece(b"", 10, 10, truncated=False)
    assert kept.read("a", "deep/result.txt", 99, 3) == Piece(b"", 99, 10, truncated=False)
    assert kept.read("a", "empty", 0, 9) == Piece(b"", 0, 0, truncated=False)
    assert "no output 'other'" in refused(kept, "other")
    assert "no longer kept" in refused(kept, "empty", "b")


def test_what_is_no_plain_file_of_the_payload_is_not_followed(scratch: Path, kept: Outputs) -> None:
    (scratch / "link").symlink_to("../secret")
    (scratch / "absolute").symlink_to(scratch.parent / "secret")
    (scratch / "way").symlink_to("..")
    (scratch / "directory").mkdir()
    os.mkfifo(scratch / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(scratch / "socket"))
    (scratch / "fine").write_text("fine")
    wrong = ["link", "absolute", "way/secret", "directory", "pipe", "socket"]
    kept.collect("a", [*wrong, "never", "fine"], opener(scratch), MIB)
    for name in wrong:
        assert "cannot be read" in refused(kept, name)
    assert "did not write it" in refused(kept, "never")
    assert whole(kept, "fine") == b"fine"
    assert b"of the host" not in b"".join(p.read_bytes() for p in (scratch.parent / "outputs/a").iterdir())


def test_a_file_without_any_permission_is_kept(scratch: Path, kept: Outputs) -> None:
    (scratch / "closed").write_text("mine")
    (scratch / "closed").chmod(0)
    kept.collect("a", ["closed"], opener(scratch), MIB)
    assert whole(kept, "closed") == b"mine"


def test_all_files_of_an_attempt_share_the_bound_of_its_storage(scratch: Path, kept: Outputs) -> None:
    """A hole takes no room where it was made, and would here."""
    (scratch / "first").write_bytes(b"x" * 600)
    with (scratch / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (scratch / "last").write_bytes(b"y")
    kept.collect("a", ["first", "sparse", "last"], opener(scratch), 1000)
    assert not kept.read("a", "first", 0, 1).truncated
    assert kept.read("a", "sparse", 0, 1) == Piece(b"\0", 0, 400, truncated=True)
    assert kept.read("a", "last", 0, 1) == Piece(b"", 0, 0, truncated=True)


def test_a_file_of_exactly_what_is_allowed_is_whole(scratch: Path, kept: Outputs) -> None:
    (scratch / "full").write_bytes(b"x" * 1000)
    (scratch / "empty").touch()
    kept.collect("a", ["full", "empty"], opener(scratch), 1000)
    assert kept.read("a", "full", 0, 1) == Piece(b"x", 0, 1000, truncated=False)
    assert not kept.read("a", "empty", 0, 1).truncated


def test_the_disk_keeps_its_reserve(scratch: Path, kept: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    (scratch / "file").write_bytes(b"x")
    monkeypatch.setattr(outputs, "DISK_RESERVE_BYTES", 1 << 60)
    kept.collect("a", ["file"], opener(scratch), MIB)
    assert kept.read("a", "file", 0, 1) == Piece(b"", 0, 0, truncated=True)


def test_the_oldest_attempts_make_room(scratch: Path, kept: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "OUTPUTS_BYTES_MAX", 2000)
    (scratch / "file").write_bytes(b"x" * 800)
    for number, name in enumerate("abc"):
        kept.collect(name, ["file"], opener(scratch), MIB)
        os.utime(scratch.parent / "outputs" / name, (number, number))
    assert "no longer kept" in refused(kept, "file", "a")
    assert len(whole(kept, "file", "b")) == len(whole(kept, "file", "c")) == 800


def test_a_directory_that_cannot_be_made_costs_the_outputs_and_nothing_else(
    scratch: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    Outputs(tmp_path / "file").collect("a", ["x"], opener(scratch), MIB)


def test_what_an_earlier_run_left_and_what_is_of_nobody_goes(scratch: Path, kept: Outputs) -> None:
    (scratch / "file").write_bytes(b"x")
    kept.collect("a", ["file"], opener(scratch), MIB)
    kept.collect("b", ["file"], opener(scratch), MIB)
    directory = scratch.parent / "outputs"
    (directory / "a.unfinished").mkdir()
    (directory / "a.unfinished" / "0").touch()
    kept.sweep({"a"})
    assert [path.name for path in directory.iterdir()] == ["a"]
    kept.remove("a")
    kept.remove("a")
    assert list(directory.iterdir()) == []


def test_sweeping_and_reading_where_nothing_was_ever_kept(kept: Outputs) -> None:
    kept.sweep(set())
    assert "no longer kept" in refused(kept, "file")


def test_a_log_is_read_in_parts_too(tmp_path: Path) -> None:
    log = logs.AttemptLog(tmp_path, "a")
    log.write(b"0123456789")
    log.close()
    assert outputs.piece_of_log(tmp_path, "a", 4, 3) == Piece(b"456", 4, 10, truncated=False)
    assert outputs.piece_of_log(tmp_path, "b", 0, 3) == Piece(b"", 0, 0, truncated=False)
