"""What becomes of attempts when leases run out, and when the executor, its watchdog or both are stopped or
killed. The rules: an engine never outlives its lease or its executor, every attempt ends with an outcome that
somebody observed or `unknown`, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ficc import clock
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Refused
from ficc.domain.lease import SECOND
from ficc.domain.plan import Endpoint, Fence
from support.executor import (
    PATIENCE_SECONDS,
    ROUTE,
    SOCKET,
    ExecutorProcess,
    Session,
    cgroups_named,
    connected,
    end_all,
    is_alive,
    leftovers,
    new_id,
    wait_for,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "os.fork(); os.setsid() if os.getpid() != os.getpgid(0) else None\n"
    "print('up', flush=True); time.sleep(600)"
)
REPLICA = Endpoint("unix", SOCKET, (("POST", ROUTE),), 1000, 1)
GONE_SECONDS = 1.0
"""How soon an engine is gone after its executor is."""
TOLERANCE_SECONDS = 1.0
"""What a busy machine may add."""


by_either = pytest.mark.parametrize("state_directory", ["bubblewrap", "podman"], indirect=True)
"""What holds by every provider of sandboxes, whose processes have other parents."""


@pytest.fixture(scope="module")
def state_directory(request: pytest.FixtureRequest) -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory(getattr(request, "param", "bubblewrap")) as executor:
        yield executor


@pytest.fixture
def executor(state_directory: ExecutorProcess) -> ExecutorProcess:
    """One that runs and holds nothing, on a state directory with a past."""
    if state_directory.returncode is not None:
        state_directory.start()
    asyncio.run(end_all(state_directory))
    (state_directory.directory / "log").write_text("")
    return state_directory


def in_seconds(seconds: float) -> dict[str, int]:
    """A lease of a short time to live, sent so long ago that it ends then."""
    ttl_seconds = max(5, math.ceil(seconds))
    return {"ttl_seconds": ttl_seconds, "sent_ns": clock.now_ns() - int((ttl_seconds - seconds) * SECOND)}


def ends_ns(lease: dict[str, int]) -> int:
    return lease["sent_ns"] + lease["ttl_seconds"] * SECOND


def soon(executor: ExecutorProcess) -> float:
    """In how many seconds a lease may end that an engine is to see the end of."""
    return {"bubblewrap": 2.5, "podman": 10.0}[executor.provider]


def processes(fence: Fence) -> list[int]:
    """What lives of an attempt."""
    return [
        int(Path(path).parent.name)
        for path in leftovers(fence.attempt_id)
        if path.startswith("/proc/") and path.endswith("/cgroup")
    ]


async def up(session: Session, **lease: Any) -> Fence:
    """A stubborn replica that runs."""
    fence = await session.run(session.plan(STUBBORN, endpoint=REPLICA), **lease)
    await session.until(fence, "running")
    while (await session.output(fence)).count("up") < 2:
        await asyncio.sleep(0.01)
    assert len(processes(fence)) >= 3
    return fence


def wait_until_gone(fence: Fence, seconds: float = GONE_SECONDS) -> None:
    wait_for(lambda: processes(fence) == [], "the engine is gone", seconds + TOLERANCE_SECONDS)


async def after_restart(executor: ExecutorProcess, *fences: Fence) -> list[dict[str, Any]]:
    """The statuses after a start; each is released, and the capacity is whole."""
    executor.start()
    async with connected(executor) as session:
        statuses = [await session.status(fence) for fence in fences]
        assert [status["state"] for status in statuses] == ["released"] * len(fences)
        snapshot = await session.control.call("snapshot")
        assert snapshot["attempts"] == []
        capacity = snapshot["snapshot"]["capacity"]["memory_bytes"]
        whole = session.plan("pass")
        whole = replace(whole, limits=replace(whole.limits, memory_bytes=capacity))
        assert (await session.finished(whole))["outcome"] == "succeeded"
    assert list((executor.state / "verdicts").iterdir()) == []
    assert list(executor.state.glob("podman/*/pids/*")) == []  # of no container
    for fence in fences:
        assert leftovers(fence.attempt_id) == []
    return statuses


def outcome(status: dict[str, Any]) -> tuple[str, str]:
    return status["outcome"], status["reason"]["code"]


# Leases.


@by_either
async def test_a_lease_that_is_not_renewed(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        lease = in_seconds(soon(executor))
        fence = await up(session, **lease)
        deadline = ends_ns(lease)
        assert clock.now_ns() < deadline
        status = await session.until(fence, "finished", "released")
        assert -0.1 < (clock.now_ns() - deadline) / SECOND < TOLERANCE_SECONDS
        assert outcome(status) == ("failed", "lease_lapsed")
        await session.until(fence, "released")
        assert (await session.renew(fence, session.renewal(9)))["refused"]["code"] == "lease_refused"


async def test_a_lease_that_lapses_before_the_start(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        fence = await session.admit(session.plan(STUBBORN), **in_seconds(0.6))
        await session.until(fence, "prepared")
        status = await session.until(fence, "released")
        assert outcome(status) == ("failed", "lease_lapsed")
        assert not status["start_intended"]
        late = await session.admit(session.plan(STUBBORN), **in_seconds(-1))
        assert outcome(await session.until(late, "released")) == ("failed", "lease_lapsed")


async def test_a_lease_that_is_renewed(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        fence = await up(session, **in_seconds(2.5))
        for sequence in range(2, 6):
            renewal = session.renewal(sequence, 5)
            result = await session.renew(fence, renewal)
            assert result == {
                "attempt_id": fence.attempt_id,
                "deadline_ns": renewal.sent_ns + 5 * SECOND,
            }
            await asyncio.sleep(0.8)
        assert (await session.status(fence))["state"] == "running"


async def test_renewals_that_are_refused(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        fence = await session.admit(session.plan(STUBBORN))
        await session.renew(fence, session.renewal(7))
        wrong = [
            session.renewal(7),
            session.renewal(6),
            replace(session.renewal(8), boot_id="another"),
            session.renewal(8, 4),
            session.renewal(8, 3601),
            replace(session.renewal(8), sent_ns=clock.now_ns() + 10**15),
        ]
        for renewal in wrong:
            result = await session.renew(fence, renewal)
            assert result["refused"]["code"] == "lease_refused", renewal
        assert "deadline_ns" in await session.renew(fence, session.renewal(8))
        # A later renewal that was sent earlier does not shorten what is granted.
        granted = (await session.renew(fence, session.renewal(9, 60)))["deadline_ns"]
        assert (await session.renew(fence, session.renewal(10, 5)))["deadline_ns"] == granted


async def test_renewals_at_once_keep_their_order(executor: ExecutorProcess) -> None:
    """Of two renewals the later sequence stands, whichever is told to the watchdog first."""
    async with connected(executor) as session, connected(executor) as other:
        fence = await up(session)
        granted = 0
        for sequence in range(2, 100, 2):
            newer, older = await asyncio.gather(
                session.renew(fence, session.renewal(sequence + 1, 60)),
                other.renew(fence, other.renewal(sequence, 5)),
            )
            assert newer["deadline_ns"] > granted
            assert older.get("deadline_ns", granted) >= granted
            assert newer["deadline_ns"] >= older.get("deadline_ns", 0)
            granted = newer["deadline_ns"]


# L4: the executor, its watchdog, or both.


@by_either
async def test_the_executor_is_killed(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        fences = [await up(session) for _ in range(2)]
        waiting = await session.admit(session.plan(STUBBORN))
        await session.until(waiting, "prepared")
    executor.kill()
    for fence in fences:
        wait_until_gone(fence)
    statuses = await after_restart(executor, *fences, waiting)
    assert {outcome(status) for status in statuses} == {("failed", "executor_restarted")}


@by_either
async def test_a_job_whose_executor_is_killed(executor: ExecutorProcess) -> None:
    """Whether it was killed or ended just before is only known if the watchdog saw it alive."""
    async with connected(executor) as session:
        fence = await session.run(session.plan(STUBBORN))
        await session.until(fence, "running")
    executor.kill()
    (status,) = await after_restart(executor, fence)
    assert outcome(status) in {("failed", "executor_restarted"), ("unknown", "end_not_observed")}


async def test_a_job_that_ended_unseen(executor: ExecutorProcess) -> None:
    """The executor hangs while a job ends by itself, and never comes back: nobody knows its status."""
    async with connected(executor) as session:
        fence = await session.run(session.plan("import time; time.sleep(1)"))
        await session.until(fence, "running")
        os.kill(executor.pid, signal.SIGSTOP)
        wait_until_gone(fence, 2)
    executor.kill()
    (status,) = await after_restart(executor, fence)
    assert outcome(status) == ("unknown", "end_not_observed")


@by_either
async def test_the_executor_is_stopped_past_a_lease(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        lease = in_seconds(soon(executor))
        fence = await up(session, **lease)
        os.kill(executor.pid, signal.SIGSTOP)
        deadline = ends_ns(lease)
        time.sleep(max(0.0, (deadline - clock.now_ns()) / SECOND - 0.3))
        assert processes(fence) != []
        wait_until_gone(fence, 0.3)
        os.kill(executor.pid, signal.SIGCONT)
        status = await session.until(fence, "released")
        assert outcome(status) == ("failed", "lease_lapsed")
        assert executor.returncode is None


@by_either
async def test_the_executor_is_stopped_past_a_lease_and_killed(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        lease = in_seconds(soon(executor))
        fence = await up(session, **lease)
    os.kill(executor.pid, signal.SIGSTOP)
    try:
        wait_until_gone(fence, (ends_ns(lease) - clock.now_ns()) / SECOND + GONE_SECONDS)
    finally:
        executor.kill()
    (status,) = await after_restart(executor, fence)
    assert outcome(status) == ("failed", "lease_lapsed")


@by_either
async def test_the_watchdog_is_killed(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        fence = await up(session)
        waiting = await session.admit(session.plan(STUBBORN))
    os.kill(executor.watchdog, signal.SIGKILL)
    assert executor.process is not None
    executor.process.wait(PATIENCE_SECONDS)
    assert executor.returncode != 0
    assert "the watchdog ended" in executor.log
    assert leftovers(executor.executor_id) == []
    statuses = await after_restart(executor, fence, waiting)
    assert {outcome(status) for status in statuses} == {("cancelled", "executor_shutdown")}


async def test_the_watchdog_hangs(executor: ExecutorProcess) -> None:
    """Noticed at the next renewal: nothing runs without a watchdog that answers."""
    async with connected(executor) as session:
        fence = await up(session)
        os.kill(executor.watchdog, signal.SIGSTOP)
        with contextlib.suppress(Refused):
            await session.renew(fence, session.renewal(2))
    assert executor.process is not None
    executor.process.wait(PATIENCE_SECONDS)
    assert executor.returncode != 0
    assert leftovers(executor.executor_id) == []
    (status,) = await after_restart(executor, fence)
    assert outcome(status) == ("cancelled", "executor_shutdown")


@by_either
async def test_both_are_killed_at_once(executor: ExecutorProcess) -> None:
    """The parent-death signal ends the engine; nobody saw it, and the next executor says so. Podman's containers
    have no parent: the next executor finds them alive and ends them."""
    async with connected(executor) as session:
        fence = await up(session)
        waiting = await session.admit(session.plan(STUBBORN))
        await session.until(waiting, "prepared")
    watchdog = executor.watchdog
    os.kill(watchdog, signal.SIGSTOP)  # so that it surely sees nothing
    executor.kill()
    os.kill(watchdog, signal.SIGKILL)
    wait_for(lambda: not is_alive(watchdog), "the watchdog is gone")
    if executor.provider == "bubblewrap":
        wait_until_gone(fence)
    ran, never = await after_restart(executor, fence, waiting)
    seen = {"bubblewrap": ("unknown", "end_not_observed"), "podman": ("failed", "executor_restarted")}
    assert outcome(ran) == seen[executor.provider]
    assert outcome(never) == ("failed", "executor_restarted")


@by_either
async def test_what_lives_at_the_next_start_is_killed(executor: ExecutorProcess) -> None:
    """Nothing is adopted: a process that is found alive is killed, and that was seen."""
    async with connected(executor) as session:
        fence = await up(session)
    watchdog = executor.watchdog
    os.kill(watchdog, signal.SIGSTOP)
    executor.kill()
    os.kill(watchdog, signal.SIGKILL)
    if executor.provider == "bubblewrap":
        wait_until_gone(fence)
    group = [Path(path) for path in cgroups_named(fence.attempt_id)]
    assert group
    unknown = group[0].with_name(new_id())
    unknown.mkdir()
    with (
        subprocess.Popen(["sleep", "600"]) as survivor,
        subprocess.Popen(["sleep", "600"]) as stranger,
    ):
        for path in group:
            (path / "cgroup.procs").write_text(str(survivor.pid))
        (unknown / "cgroup.procs").write_text(str(stranger.pid))
        (status,) = await after_restart(executor, fence)
        assert survivor.wait(5) == stranger.wait(5) == -signal.SIGKILL
    assert outcome(status) == ("failed", "executor_restarted")
    assert not unknown.exists()


@by_either
async def test_a_reboot(executor: ExecutorProcess) -> None:
    """L5: under another boot id nobody knows what became of what was started."""
    async with connected(executor) as session:
        started = await up(session)
        waiting = await session.admit(session.plan(STUBBORN))
        await session.until(waiting, "prepared")
    executor.kill()
    wait_until_gone(started)
    with contextlib.closing(sqlite3.connect(executor.state / "ledger.sqlite")) as db, db:
        db.execute("UPDATE attempts SET boot_id = 'an earlier one'")
    ran, never = await after_restart(executor, started, waiting)
    assert outcome(ran) == ("unknown", "node_rebooted")
    assert outcome(never) == ("cancelled", "node_rebooted")


# Killed anywhere.

POINTS = ("admitted", "staging", "prepared", "starting", "set up", "running", "stopping", "finished")


@by_either
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at(executor: ExecutorProcess, point: str) -> None:
    """L4: SIGKILL as soon as the attempt is known to be there, and a random moment later."""
    moments = random.Random(point)
    for round_number in range(2):
        set_up_seconds = {"bubblewrap": 0.05, "podman": 0.5}[executor.provider]
        delay = moments.uniform(0, set_up_seconds) * round_number + (0.03 if point == "set up" else 0)
        fence = await _killed_at(executor, point, delay)
        (status,) = await after_restart(executor, fence)
        Outcome(status["outcome"])
        if point in ("admitted", "staging") and not round_number:
            assert not status["start_intended"]
        if not status["start_intended"]:
            assert status["outcome"] != "unknown"
        if point == "stopping":
            assert status["outcome"] in ("cancelled", "unknown")


async def _killed_at(executor: ExecutorProcess, point: str, delay: float) -> Fence:
    """The fence of an attempt that was seen at this point when the executor was killed."""
    async with connected(executor) as session:
        plan = session.plan(STUBBORN, endpoint=REPLICA)
        fence = Fence(new_id(), 1, plan.digest)

        def seen() -> set[str]:
            return {event["attempt"]["state"] for event in session.events if "attempt" in event}

        async def drive() -> None:
            await session.admit(plan, fence)
            if point in ("admitted", "staging", "prepared"):
                return
            while "prepared" not in seen():
                await asyncio.sleep(0)
            await session.act("start", fence)
            if point in ("stopping", "finished"):
                await session.until(fence, "running")
                await session.stop(fence, 0.2)

        driving = asyncio.create_task(drive())
        wanted = "starting" if point == "set up" else point
        async with asyncio.timeout(PATIENCE_SECONDS):
            while wanted not in seen():
                await asyncio.sleep(0)
        await asyncio.sleep(delay)
        executor.kill()
        with contextlib.suppress(Refused):
            await driving
    wait_until_gone(fence)
    return fence


# Ends in order.


@by_either
async def test_sigterm(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        running = await up(session)
        prepared = await session.admit(session.plan(STUBBORN))
        await session.until(prepared, "prepared")
        polite = await session.run(session.plan("import time; time.sleep(600)"))
        starting = await session.admit(session.plan(STUBBORN))
        await session.until(starting, "prepared")
        await session.act("start", starting)
        began = time.monotonic()
        executor.kill(signal.SIGTERM)
        assert time.monotonic() - began < 5 + 5
        assert executor.returncode == 0
        await session.control.lost
        states = [e["attempt"]["state"] for e in session.events if "attempt" in e]
        assert states.count("released") == 4  # told before the end
    assert not executor.socket.exists()
    assert leftovers(executor.executor_id) == []
    statuses = await after_restart(executor, running, prepared, polite, starting)
    assert {outcome(status) for status in statuses} == {("cancelled", "executor_shutdown")}


async def test_nothing_is_admitted_while_it_ends(executor: ExecutorProcess) -> None:
    slow = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: time.sleep(1) or exit())\n"
        "print('up', flush=True); time.sleep(600)"
    )
    async with connected(executor) as session:
        running = await session.run(session.plan(slow))
        await session.until(running, "running")
        while "up" not in await session.output(running):
            await asyncio.sleep(0.01)
        prepared = await session.admit(session.plan("print('ran')"))
        await session.until(prepared, "prepared")
        os.kill(executor.pid, signal.SIGTERM)
        while not any(e.get("attempt", {}).get("state") == "stopping" for e in session.events):
            await asyncio.sleep(0.01)
        with pytest.raises(Refused, match=r"executor_unavailable.*shutting down"):
            await session.admit(session.plan("pass"))
        assert (await session.act("start", prepared))["state"] in ("stopping", "finished", "released")
    assert executor.process is not None
    assert executor.process.wait(PATIENCE_SECONDS) == 0


async def test_two_executors_on_one_state_directory(executor: ExecutorProcess) -> None:
    second = executor.launch()
    assert second.wait(PATIENCE_SECONDS) == 1
    assert "executor.lock is held by another process" in executor.log
    async with connected(executor) as session:
        assert (await session.finished(session.plan("pass")))["outcome"] == "succeeded"


async def test_what_an_earlier_run_left_on_disk_is_no_obstacle(executor: ExecutorProcess) -> None:
    """A socket file, and verdicts that were cut short or belong to nobody."""
    identity = executor.executor_id
    executor.kill()
    assert executor.socket.is_socket()
    verdicts = executor.state / "verdicts"
    (verdicts / new_id()).write_text('{"why": "lease_la')
    (verdicts / new_id()).write_text(json.dumps({"why": "lease_lapsed", "alive": True}))
    await after_restart(executor)
    assert executor.executor_id == identity
