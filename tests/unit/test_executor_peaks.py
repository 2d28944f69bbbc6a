"""Memory peaks of attempts: of real processes, told when they rose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ficc.executor.peaks import Peaks, resident_peak

MIB = 1 << 20
TAKEN = 64 * MIB
SCRIPT = f"x = b'x' * {TAKEN}; del x; print('taken', flush=True); input()"
"""Takes memory, gives it back, and waits: what is resident at the end is not the peak."""


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


def test_the_peak_outlives_what_was_given_back(process: int) -> None:
    assert TAKEN < resident_peak([process]) < TAKEN + 64 * MIB


def test_processes_add_up_and_those_that_are_gone_count_nothing(process: int) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert resident_peak([process, process, gone.pid]) == 2 * resident_peak([process])
    assert resident_peak([]) == 0


def test_only_a_rise_is_told(process: int) -> None:
    told: list[tuple[str, int]] = []
    peaks = Peaks(lambda attempt_id, peak: told.append((attempt_id, peak)))
    peaks.sample("a", [process])
    peaks.sample("a", [process])
    peaks.sample("a", [])
    assert [attempt_id for attempt_id, _ in told] == ["a"]
    peaks.sample("a", [process, process])
    assert told[1][1] == 2 * told[0][1] == 2 * resident_peak([process])
    assert peaks.all() == {"a": told[1][1]}
    peaks.forget("a")
    assert peaks.all() == {}
    peaks.sample("a", [process])
    assert len(told) == 3
