"""Failpoints: nothing happens unless a test armed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ficc import failpoints
from ficc.failpoints import NAMES, VARIABLE, failpoint, kill_at


def pass_by(armed: str, *names: str) -> int:
    """The exit status of a process that passes these points."""
    script = "from ficc.failpoints import failpoint\n" + "".join(f"failpoint({name!r})\n" for name in names)
    return subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, VARIABLE: armed}, capture_output=True
    ).returncode


def test_nothing_is_armed_here() -> None:
    assert failpoints.on_pass is None
    for name in NAMES:
        failpoint(name)


def test_an_armed_process_dies_at_the_pass_that_was_named() -> None:
    one, other = NAMES[:2]
    assert pass_by(one, other, other) == 0
    assert pass_by(one, other, one) == -signal.SIGKILL
    assert pass_by(f"{one}:3", one, one) == 0
    assert pass_by(f"{one}:3", one, one, one) == -signal.SIGKILL
    assert pass_by("", one) == 0


def test_a_point_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no failpoint"):
        kill_at("executor.nowhere", 1)
    assert pass_by("executor.nowhere") == 1


def test_names_are_unique_and_say_whose_they_are() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {name.partition(".")[0] for name in NAMES} == {"controller", "executor"}
