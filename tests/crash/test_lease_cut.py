"""A controller and an executor that lose sight of each other: the executor ends its engines by itself, and before the
controller believes it; an answer that was lost is looked up."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation
from ficc.domain.lease import SECOND, patience_ns
from support.executor import leftovers
from support.relay import Relay, relayed

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

TTL_SECONDS = 5
BUSY_SECONDS = 30.0
LEASE_OVER_SECONDS = patience_ns(TTL_SECONDS) / SECOND + BUSY_SECONDS
"""From the cut until the controller holds the lease to be over, and what a busy machine may add."""


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[ScriptedInstallation]:
    made = ScriptedInstallation(tmp_path, settings={"FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS)})
    try:
        yield made
    finally:
        for process in made.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        made.stop()


@pytest.fixture
def relay(installation: ScriptedInstallation) -> Iterator[Relay]:
    installation.start("executor")
    with relayed(installation.executor_socket) as relay:
        installation.start("controller")
        yield relay
        relay.heal()
        installation.kill("controller", signal.SIGTERM)


def replica(installation: ScriptedInstallation, service_id: str) -> dict[str, Any]:
    found: dict[str, Any] = installation.record(service_id)["replicas"][0]
    return found


def ledger(installation: ScriptedInstallation) -> dict[str, dict[str, Any]]:
    """What the executor recorded of each attempt."""
    file = installation.directory / "executor" / "ledger.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT attempt_id, record FROM attempts").fetchall()
    return {attempt_id: json.loads(record) for attempt_id, record in rows}


def running(installation: ScriptedInstallation) -> list[str]:
    """Attempts of which anything runs."""
    return [
        one for one in ledger(installation) if any(found.startswith("/proc/") for found in leftovers(one))
    ]


def test_l2_an_executor_that_is_cut_off_ends_its_engine_before_the_controller_believes_it(
    installation: ScriptedInstallation, relay: Relay
) -> None:
    """And nothing ever runs twice."""
    service = installation.service("one")
    (first,) = (one["attempt_id"] for one in service["replicas"])
    relay.cut()

    def over() -> dict[str, Any] | None:
        """In this order: what the controller believes is looked at first."""
        believed = replica(installation, service["id"])["outcome"]
        recorded, alive = ledger(installation)[first], leftovers(first)
        if believed is None:
            return None
        assert recorded["state"] == "released"
        assert alive == []
        return recorded

    recorded = installation.until(over, "the lease is over for the controller", seconds=LEASE_OVER_SECONDS)
    assert recorded is not None
    assert (recorded["outcome"], recorded["reason"]["code"]) == ("failed", "lease_lapsed")
    assert replica(installation, service["id"])["outcome"] == "unknown"
    assert running(installation) == []

    relay.heal()

    def again() -> bool:
        assert len(running(installation)) <= 1
        now = replica(installation, service["id"])
        return now["attempt_id"] != first and now["state"] == "ready"

    installation.until(again, "another attempt is ready", seconds=BUSY_SECONDS)
    assert installation.chat(service["id"]).status == 200


def test_l2_a_controller_that_is_stopped_keeps_no_engine_alive(installation: ScriptedInstallation) -> None:
    installation.start()
    service = installation.service("one")
    (first,) = (one["attempt_id"] for one in service["replicas"])
    controller = installation.processes["controller"]
    controller.send_signal(signal.SIGSTOP)
    installation.until(
        lambda: ledger(installation)[first]["state"] == "released",
        "the executor ended it",
        seconds=TTL_SECONDS + BUSY_SECONDS,
    )
    recorded = ledger(installation)[first]
    assert (recorded["outcome"], recorded["reason"]["code"]) == ("failed", "lease_lapsed")
    assert leftovers(first) == []
    controller.send_signal(signal.SIGCONT)
    installation.until(
        lambda: replica(installation, service["id"])["attempt"] == 2,
        "it is tried again",
        seconds=BUSY_SECONDS,
    )
    installation.settled(service["id"], "ready")
    assert running(installation) == [replica(installation, service["id"])["attempt_id"]]


def test_l2_a_cut_that_is_shorter_than_the_lease_ends_nothing(
    installation: ScriptedInstallation, relay: Relay
) -> None:
    """Half a lease without a word, then the same attempt goes on."""
    service = installation.service("one")
    (first,) = (one["attempt_id"] for one in service["replicas"])
    sequence = lease(installation, first)
    relay.cut()
    time.sleep(TTL_SECONDS / 3)
    relay.heal()
    installation.until(lambda: lease(installation, first) > sequence + 1, "it is renewed again")
    assert installation.chat(service["id"]).status == 200
    assert [one["attempt_id"] for one in installation.record(service["id"])["replicas"]] == [first]


def lease(installation: ScriptedInstallation, attempt_id: str) -> int:
    file = installation.directory / "controller" / "ficc.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        query = "SELECT lease_sequence FROM attempts WHERE id = ?"
        return int(db.execute(query, (attempt_id,)).fetchone()[0])


@pytest.mark.parametrize("operation", ["admit", "start", "stop"])
def test_l7_an_answer_that_is_lost_is_looked_up_and_nothing_is_sent_twice(
    installation: ScriptedInstallation, relay: Relay, operation: str
) -> None:
    """The executor did what it was told, and the connection broke before it could say so."""
    if operation == "stop":
        service = installation.service("one")
        relay.lose_answer_to("stop")
    else:
        relay.lose_answer_to(operation)
        service = installation.service("one")
        assert installation.chat(service["id"]).status == 200
    stopped = installation.stopped(service["id"])
    assert relay.lost == [operation]
    assert [relay.calls.count(name) for name in ("admit", "start")] == [1, 1]
    assert list(ledger(installation)) == [stopped["replicas"][0]["attempt_id"]]
    assert (stopped["replicas"][0]["attempt"], stopped["replicas"][0]["outcome"]) == (1, "cancelled")
