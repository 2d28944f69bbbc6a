"""How an attempt ended: a decision from what was observed. Nothing here guesses an outcome."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path

from ficc import clock
from ficc.domain import attempt
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason
from ficc.domain.plan import Plan
from ficc.domain.quantity import size
from ficc.executor.guard import Verdict
from ficc.executor.ledger import Entry
from ficc.executor.providers.contract import Exit

LAPSED = Reason("lease_lapsed", "The lease was not renewed in time, so the sandbox was ended.")
SHUTDOWN = Reason("executor_shutdown", "The executor was shut down.")


def of_exit(
    plan: Plan, ended: Exit, *, out_of_memory: bool, process_limit_hits: int, lapsed: bool
) -> attempt.End:
    """The end of a payload that was seen to end."""
    if ended.status == 0 and plan.endpoint is None:
        return attempt.End(Outcome.SUCCEEDED, Reason("exited", "The command exited with status 0."))
    what = _what(plan)
    if lapsed and ended.signal == signal.SIGKILL:
        return attempt.End(Outcome.FAILED, LAPSED)
    if out_of_memory:
        text = f"The {what} was killed at its memory limit of {size(plan.limits.memory_bytes)}."
        return attempt.End(Outcome.FAILED, Reason("out_of_memory", text))
    besides = ""
    if process_limit_hits:
        besides = f"; it had reached its limit of {plan.limits.processes} processes"
    if ended.signal is None:
        text = f"The {what} exited with status {ended.status}{besides}."
        return attempt.End(Outcome.FAILED, Reason("engine_exited", text))
    itself = "" if ended.status is None else f", or exited with status {ended.status} itself"
    text = f"The {what} was ended by signal {ended.signal}{itself}{besides}."
    return attempt.End(Outcome.FAILED, Reason("engine_killed", text))


def not_launched(plan: Plan, what: str, *, out_of_memory: bool) -> attempt.End:
    """The end of an attempt whose payload never ran."""
    if out_of_memory:
        what = f"a sandbox cannot be made within a memory limit of {size(plan.limits.memory_bytes)}."
    return attempt.End(Outcome.FAILED, Reason("launch_failed", f"The {_what(plan)} was not started: {what}"))


def _what(plan: Plan) -> str:
    """What runs, as people call it."""
    return "command" if plan.endpoint is None else "engine"


def not_removed(pids: Iterable[int], groups: Iterable[Path]) -> Reason:
    """Why an attempt that ended is not released, and what to do about it."""
    processes = ", ".join(map(str, sorted(pids)))
    left = f"processes {processes} do not end" if processes else "its control groups cannot be removed"
    where = ", ".join(str(path) for path in groups if path.exists())
    text = (
        f"The attempt ended, but {left} ({where}). Its reservation stays held, and cleaning up goes on. A process that "
        "not even SIGKILL ends waits in the kernel for a disk or a driver: see `dmesg`, repair that or restart the "
        "machine; other processes or groups in there were put there by somebody, and have to be moved away. It is "
        "released as soon as nothing is left."
    )
    return Reason("quarantined", text)


def left_behind(entry: Entry, verdict: Verdict | None, *, seen_alive: bool) -> attempt.Event:
    """The end of an attempt of an earlier run: known only if it never began, was killed here or by the
    watchdog, or is a replica that the watchdog found ended: a replica that ended has failed, whichever way.
    """
    if entry.boot_id != clock.boot_id():
        reason = Reason("node_rebooted", "The machine was rebooted while the attempt held its lease.")
        return attempt.LoseTrack(reason)
    ended_by_watchdog = verdict is not None and (verdict.alive or entry.plan.endpoint is not None)
    if not (seen_alive or ended_by_watchdog or not entry.record.start_intended):
        reason = Reason("end_not_observed", "The executor went away and nobody saw how the engine ended.")
        return attempt.LoseTrack(reason)
    if verdict is not None and verdict.why == "lease_lapsed":
        text = "The lease ran out while the executor did not answer; the watchdog ended the sandbox."
        return attempt.End(Outcome.FAILED, Reason("lease_lapsed", text))
    text = "The executor restarted; what it had left was ended."
    return attempt.End(Outcome.FAILED, Reason("executor_restarted", text))
