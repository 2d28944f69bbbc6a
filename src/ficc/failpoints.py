"""Named points at which a test lets a process die, one at every boundary between what is durable and what is done.

    failpoint("executor.start_intended")

costs a comparison while nothing is armed, which is always so outside of tests. A process of a test is armed by its
environment: `FICC_FAILPOINT=NAME` kills it, as SIGKILL does, when it passes the point; `FICC_FAILPOINT=NAME:3` at the
third pass. The simulation arms its processes by `on_pass`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

VARIABLE = "FICC_FAILPOINT"

NAMES = (
    # The controller, in the order of an attempt's life.
    "controller.before_commit",  # a transaction's statements are done
    "controller.committed",  # and durable; whoever waits for it was not told
    "controller.admit_recorded",  # the first lease is durable, nothing was sent
    "controller.admit_answered",
    "controller.start_intended",  # the intent is durable, nothing was sent
    "controller.start_sent",  # its call begins
    "controller.stop_decided",  # nothing was sent
    "controller.ready_recorded",
    "controller.record_followed",  # the executor's word is durable here
    "controller.release_recorded",
    "controller.renewal_committed",  # the longer lease is durable, nothing was sent
    "controller.renewal_answered",
    # The executor, likewise.
    "executor.before_write",  # into the ledger
    "executor.written",
    "executor.admitted",  # the reservation is durable, no lease is held
    "executor.leased",  # and the watchdog armed
    "executor.prepared",
    "executor.start_intended",  # the intent is durable, nothing runs
    "executor.group_made",
    "executor.sandbox_made",  # the payload waits
    "executor.payload_started",  # and nobody wrote so down
    "executor.running",
    "executor.stop_requested",  # durable, and no signal was sent
    "executor.end_observed",  # and nobody wrote it down
    "executor.end_recorded",
    "executor.cleaned_up",  # nothing is left, the reservation is held
    "executor.lease_given_back",
    "executor.released",
    "executor.renewal_held",  # the watchdog was not told
    "executor.renewal_guarded",
    "executor.lapsed",  # the lease is over, the stop is not recorded
    "executor.left_behind_recorded",  # the end of what an earlier run left
)

on_pass: Callable[[str], None] | None = None
"""Told of every point that is passed. None: nothing is armed."""


def failpoint(name: str) -> None:
    """Pass a point."""
    if on_pass is not None:
        on_pass(name)


def kill_at(name: str, passes: int) -> Callable[[str], None]:
    """What ends this process at a pass of a point. Raises ValueError for a point that there is not."""
    if name not in NAMES or passes < 1:
        raise ValueError(f"no failpoint {name!r}, pass {passes}")
    left = passes

    def pass_by(passed: str) -> None:
        nonlocal left
        if passed == name:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    return pass_by


def arm_from_environment() -> None:
    """Raises ValueError."""
    global on_pass
    name, _, passes = os.environ.get(VARIABLE, "").partition(":")
    if name:
        on_pass = kill_at(name, int(passes or 1))


arm_from_environment()
