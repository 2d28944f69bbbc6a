"""Logs of attempts: bounded, the newest kept, never in the way of an engine."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from ficc.executor import logs
from ficc.executor.logs import SEGMENT_BYTES_MAX, AttemptLog


@pytest.fixture
def log(tmp_path: Path) -> AttemptLog:
    return AttemptLog(tmp_path, "a")


def test_output_is_kept_as_it_came(tmp_path: Path, log: AttemptLog) -> None:
    for piece in (b"one\n", b"\xff\x00\n", b"three"):
        log.write(piece)
    assert logs.tail(tmp_path, "a") == (b"one\n\xff\x00\nthree", False)
    assert (tmp_path / "a.log").stat().st_mode & 0o777 == 0o600


def test_an_attempt_without_a_log(tmp_path: Path) -> None:
    assert logs.tail(tmp_path, "a") == (b"", False)
    assert logs.last_lines(tmp_path, "a") == ""
    assert logs.last_line(tmp_path, "a") == ""
    logs.remove(tmp_path, "a")


def test_the_newest_is_kept(tmp_path: Path, log: AttemptLog) -> None:
    for number in range(60_000):
        log.write(b"%099d\n" % number)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * SEGMENT_BYTES_MAX
    data, cut = logs.tail(tmp_path, "a")
    assert cut
    assert len(data) == logs.TAIL_BYTES_MAX
    assert data.endswith(b"59998\n" + b"0" * 94 + b"59999\n")


@pytest.mark.parametrize("beyond", [0, 1, 10, 100_000])
def test_a_tail_over_both_segments(tmp_path: Path, log: AttemptLog, beyond: int) -> None:
    """No byte is missing where one segment ends and the next begins."""
    whole = os.urandom(SEGMENT_BYTES_MAX + beyond)
    log.write(whole[:SEGMENT_BYTES_MAX])
    if beyond:
        log.write(whole[SEGMENT_BYTES_MAX:])
    data, cut = logs.tail(tmp_path, "a", 50_000)
    assert (data, cut) == (whole[-50_000:], True)
    data, cut = logs.tail(tmp_path, "a", len(whole))
    assert (data, cut) == (whole, False)


def test_more_than_a_segment_at_once(tmp_path: Path, log: AttemptLog) -> None:
    log.write(b"x")
    log.write(bytes(SEGMENT_BYTES_MAX) + b"end")
    data, _ = logs.tail(tmp_path, "a", 10)
    assert data.endswith(b"end")
    assert (tmp_path / "a.log").stat().st_size == SEGMENT_BYTES_MAX


def test_it_goes_on_where_it_was(tmp_path: Path, log: AttemptLog) -> None:
    log.write(b"x" * (SEGMENT_BYTES_MAX - 1))
    log.close()
    again = AttemptLog(tmp_path, "a")
    again.write(b"yz")
    assert (tmp_path / "a.log").read_bytes() == b"yz"
    assert (tmp_path / "a.earlier.log").stat().st_size == SEGMENT_BYTES_MAX - 1


def test_after_close_nothing_is_written(tmp_path: Path, log: AttemptLog) -> None:
    log.write(b"before")
    log.close()
    log.close()
    log.write(b"after")
    assert logs.tail(tmp_path, "a") == (b"before", False)


def test_a_disk_that_is_full_does_not_stop_anyone(tmp_path: Path, log: AttemptLog) -> None:
    """A limit on file sizes stands in for it: a write fails or falls short."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for _ in range(100):
            log.write(b"x" * 300)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "a.log").stat().st_size == 1000
    log.write(b"room again")
    assert logs.tail(tmp_path, "a")[0].endswith(b"room again")


def test_the_last_lines_are_for_people(tmp_path: Path, log: AttemptLog) -> None:
    log.write(b"".join(b"line %d\n\n" % n for n in range(100)) + b"\x1b[31mred\x1b[0m \xff\ttab\n")
    lines = logs.last_lines(tmp_path, "a").splitlines()
    assert len(lines) == logs.LAST_LINES
    assert lines[:-1] == [f"line {n}" for n in range(89, 100)]
    assert lines[-1] == "red \ufffd tab"


def test_what_an_engine_warns_of_in_vain_is_not_its_last_word(tmp_path: Path, log: AttemptLog) -> None:
    log.write(b"W srv init: security: no API key is set and CORS allows all origins\nE no such tensor\n")
    assert logs.last_lines(tmp_path, "a") == "E no such tensor"
    assert b"API key" in logs.tail(tmp_path, "a")[0]


def test_one_endless_line(tmp_path: Path, log: AttemptLog) -> None:
    log.write("é".encode() * 10_000)
    last = logs.last_lines(tmp_path, "a")
    assert len(last.encode()) <= logs.LAST_LINES_BYTES_MAX + 2
    assert last.endswith("éé")


def test_removal(tmp_path: Path, log: AttemptLog) -> None:
    log.write(bytes(SEGMENT_BYTES_MAX))
    log.write(b"x")
    logs.remove(tmp_path, "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "last"),
    [
        (b"loading model\n", "loading model"),
        (b"loading model\n....................\n\n", "loading model"),  # dots are how far it is, not words
        (b"10 %\rload 20 %\rload 30 %", "load 30 %"),
        (b"\x1b[2K\x1b[1;32mINFO\x1b[0m\tweights \x1b]0;title\x07read\n", "INFO weights read"),
        (b"bell\x07 and \xff\n", "bell\ufffd and \ufffd"),
        (b"x" * 3000, "x" * logs.LAST_LINE_CHARACTERS_MAX),
        (b"ready\nwarning: no API key is set\n", "ready"),
    ],
)
def test_the_last_line_is_for_people(tmp_path: Path, log: AttemptLog, said: bytes, last: str) -> None:
    log.write(said)
    assert logs.last_line(tmp_path, "a") == last
