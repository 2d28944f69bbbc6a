"""How attempts are said to have ended, from what was observed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficc import clock
from ficc.domain import attempt, ids
from ficc.domain.attempt import Outcome, Record, State
from ficc.domain.plan import Endpoint, Fence, Limits, Plan, Runtime
from ficc.executor import endings
from ficc.executor.guard import Verdict
from ficc.executor.ledger import Entry
from ficc.executor.providers.contract import Exit

JOB = Plan(
    node_id="n",
    runtime=Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64),
    argv=("/bin/engine",),
    environment={},
    limits=Limits(100, 64 << 20, processes=9),
)
REPLICA = replace(JOB, endpoint=Endpoint("unix", "/run/ficc/e.sock", (), 1, 1))
KILLED = Exit(None, 9)


@pytest.mark.parametrize(
    ("plan", "ended", "observed", "outcome", "code", "words"),
    [
        (JOB, Exit(0, None), {}, "succeeded", "exited", "status 0"),
        (JOB, Exit(0, None), {"lapsed": True}, "succeeded", "exited", ""),  # it was done before
        (JOB, Exit(0, None), {"out_of_memory": True}, "succeeded", "exited", ""),  # a child it could spare
        (REPLICA, Exit(0, None), {}, "failed", "engine_exited", "status 0"),
        (JOB, Exit(3, None), {}, "failed", "engine_exited", "status 3."),
        (JOB, Exit(3, None), {"lapsed": True}, "failed", "engine_exited", "status 3"),
        (
            JOB,
            Exit(1, None),
            {"process_limit_hits": 2},
            "failed",
            "engine_exited",
            "its limit of 9 processes",
        ),
        (JOB, KILLED, {}, "failed", "engine_killed", "signal 9."),
        (JOB, KILLED, {"lapsed": True}, "failed", "lease_lapsed", "not renewed"),
        (JOB, KILLED, {"lapsed": True, "out_of_memory": True}, "failed", "lease_lapsed", ""),
        (JOB, KILLED, {"out_of_memory": True}, "failed", "out_of_memory", "67.1 MB"),
        (JOB, Exit(137, 9), {}, "failed", "engine_killed", "or exited with status 137 itself"),
        (JOB, Exit(1, None), {"out_of_memory": True}, "failed", "out_of_memory", "memory limit"),
        (JOB, Exit(139, 11), {}, "failed", "engine_killed", "signal 11"),
    ],
)
def test_exits(
    plan: Plan, ended: Exit, observed: dict[str, int], outcome: str, code: str, words: str
) -> None:
    facts = {"out_of_memory": False, "process_limit_hits": 0, "lapsed": False, **observed}
    end = endings.of_exit(plan, ended, **facts)  # type: ignore[arg-type]
    assert (end.outcome, end.reason.code) == (outcome, code)
    assert words in end.reason.message


def test_launches_that_failed() -> None:
    end = endings.not_launched(JOB, "the disk is gone.", out_of_memory=False)
    assert (end.outcome, end.reason.code) == (Outcome.FAILED, "launch_failed")
    assert "the disk is gone" in end.reason.message
    assert "64" not in end.reason.message
    assert "67.1 MB" in endings.not_launched(JOB, "it ended.", out_of_memory=True).reason.message


STARTED = Record(State.RUNNING, start_intended=True)
WAITING = Record(State.PREPARED)
SEEN = Verdict("executor_gone", alive=True)
EMPTY = Verdict("executor_gone", alive=False)
LATE = Verdict("lease_lapsed", alive=True)


@pytest.mark.parametrize(
    ("plan", "record", "verdict", "alive", "outcome", "code"),
    [
        (JOB, STARTED, SEEN, False, "failed", "executor_restarted"),
        (JOB, STARTED, EMPTY, False, "unknown", "end_not_observed"),
        (REPLICA, STARTED, EMPTY, False, "failed", "executor_restarted"),
        (JOB, STARTED, LATE, False, "failed", "lease_lapsed"),
        (JOB, STARTED, None, True, "failed", "executor_restarted"),
        (JOB, STARTED, None, False, "unknown", "end_not_observed"),
        (REPLICA, STARTED, None, False, "unknown", "end_not_observed"),
        (JOB, WAITING, None, False, "failed", "executor_restarted"),
        (JOB, WAITING, LATE, False, "failed", "lease_lapsed"),
        (
            JOB,
            replace(STARTED, state=State.STOPPING, ending=Outcome.CANCELLED),
            SEEN,
            False,
            "cancelled",
            None,
        ),
        (JOB, replace(STARTED, state=State.STOPPING, ending=Outcome.CANCELLED), None, False, "unknown", None),
    ],
)
@pytest.mark.parametrize("boot", ["this", "an earlier one"])
def test_what_an_earlier_run_left(
    plan: Plan,
    record: Record,
    verdict: Verdict | None,
    alive: bool,
    outcome: str,
    code: str | None,
    boot: str,
) -> None:
    boot_id = clock.boot_id() if boot == "this" else boot
    entry = Entry(Fence(ids.make(1, bytes(10)), 1, plan.digest), plan, record, boot_id, 0)
    after = attempt.advance(record, endings.left_behind(entry, verdict, seen_alive=alive))
    assert after.state is State.FINISHED
    if boot == "this":
        assert after.outcome == outcome
        assert code is None or (after.reason and after.reason.code == code)
    else:
        assert after.outcome == ("unknown" if record.start_intended else "cancelled")
