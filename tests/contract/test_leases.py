"""Leases that are renewed whatever endpoint reads do; and what holds once an end is known to nobody."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from contract.scripted import Open, ScriptedInstallation
from ficc.domain.lease import SECOND, patience_ns

pytestmark = pytest.mark.timeout(240)

TTL_SECONDS = 5
PATIENCE_SECONDS = patience_ns(TTL_SECONDS) / SECOND + 30.0
"""From the loss of an executor until the controller holds its leases to be over, and then some."""
CONCURRENCY = 3


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    settings = {"FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS)}
    with ScriptedInstallation(tmp_path_factory.mktemp("leases"), settings=settings) as made:
        yield made


def attempts(installation: ScriptedInstallation, service_id: str) -> list[str]:
    return [replica["attempt_id"] for replica in installation.record(service_id)["replicas"]]


def renewals(installation: ScriptedInstallation, service_id: str) -> list[int]:
    """How often each replica's lease was renewed."""
    file = installation.directory / "controller" / "ficc.sqlite"
    query = "SELECT lease_sequence FROM attempts WHERE service_id = ? ORDER BY id"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        return [sequence for (sequence,) in db.execute(query, (service_id,))]


@pytest.mark.contract("C-X9")
def test_leases_are_renewed_while_every_slot_is_held_by_somebody_who_does_not_read(
    installation: ScriptedInstallation,
) -> None:
    """For longer than a lease lasts, every endpoint read of both replicas waits for its client."""
    service_id = installation.service("unread", replicas=2, concurrency=CONCURRENCY)["id"]
    before, renewed = attempts(installation, service_id), renewals(installation, service_id)
    streams = [Open(installation, service_id, do="pour", stream=True) for _ in range(2 * CONCURRENCY)]
    answers = [stream.answer() for stream in streams]
    assert [answer.status for answer in answers] == [200] * len(streams)
    in_flight = [replica["in_flight"] for replica in installation.record(service_id)["replicas"]]
    assert in_flight == [CONCURRENCY] * 2

    time.sleep(1.3 * TTL_SECONDS)

    assert attempts(installation, service_id) == before
    for now, then in zip(renewals(installation, service_id), renewed, strict=True):
        assert now >= then + 2
    for answer in answers:  # nobody's stream ended either
        assert len(answer.read(1 << 20)) == 1 << 20
    for stream in streams:
        stream.close()
    installation.remove(service_id)


# An outcome that nobody knows.


@pytest.fixture(scope="module")
def unknown(installation: ScriptedInstallation) -> dict[str, Any]:
    """A stopped service both of whose replicas ended unknown, in the middle of a request that each had.

    Its executor was killed, and when it comes back it finds that its machine was booted anew (its ledger is made to
    say so, which is all that it goes by): so nobody saw the engines' end, and nobody will.
    """
    service = installation.service("unknown", replicas=2)
    requests = [Open(installation, service["id"], do="hang", key=f"request {n}") for n in range(2)]
    for n in range(2):
        begun(installation, service["id"], f"request {n}")
    installation.kill("executor", signal.SIGKILL)
    with closing(sqlite3.connect(installation.directory / "executor" / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE attempts SET boot_id = 'an earlier boot'")
    for request in requests:
        assert json.loads(request.answer().read())["error"]["code"] == "peer_lost"
    installation.control(service["id"], "stop").ok(202)
    return installation.settled(service["id"], "stopped", seconds=PATIENCE_SECONDS)


def begun(installation: ScriptedInstallation, service_id: str, key: str) -> None:
    installation.until(lambda: installation.times(service_id, key) == 1, "an engine has the request")


def start(installation: ScriptedInstallation, service: dict[str, Any], **more: Any) -> Any:
    return installation.control(service["id"], "start", **more)


@pytest.mark.contract("C-U1")
@pytest.mark.parametrize("more", [{}, {"acknowledge_unknown": False}, {"acknowledge_unknown": None}])
def test_a_start_without_the_acknowledgement_is_refused_and_tries_no_replica(
    installation: ScriptedInstallation, unknown: dict[str, Any], more: dict[str, Any]
) -> None:
    assert [replica["outcome"] for replica in unknown["replicas"]] == ["unknown"] * 2
    answer = start(installation, unknown, **more)
    assert (answer.status, answer.code) == (409, "inference_unknown_outcome")
    assert set(answer.json["error"]["attempts"]) == {r["attempt_id"] for r in unknown["replicas"]}
    assert installation.record(unknown["id"]) == unknown


@pytest.mark.contract("C-U4")
@pytest.mark.parametrize("action", ["drain", "stop", "remove"])
@pytest.mark.parametrize("value", [True, False])
def test_no_other_action_takes_the_acknowledgement(
    installation: ScriptedInstallation, unknown: dict[str, Any], action: str, value: bool
) -> None:
    answer = installation.control(unknown["id"], action, acknowledge_unknown=value)
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "acknowledge_unknown")
    assert installation.record(unknown["id"]) == unknown


@pytest.mark.contract("C-U2")
def test_acknowledged_or_not_every_attempt_has_to_be_released(
    installation: ScriptedInstallation, unknown: dict[str, Any]
) -> None:
    """The executor is still away, so nothing proves that its engines are gone."""
    assert not any(replica["released"] for replica in unknown["replicas"])
    answer = start(installation, unknown, acknowledge_unknown=True)
    assert (answer.status, answer.code) == (409, "attempt_not_released")
    assert set(answer.json["error"]["attempts"]) == {r["attempt_id"] for r in unknown["replicas"]}
    assert installation.control(unknown["id"], "remove").code == "attempt_not_released"
    assert installation.record(unknown["id"]) == unknown


@pytest.mark.contract("C-U1", "C-U2", "C-U3")
def test_released_and_acknowledged_it_starts_new_attempts_and_sends_no_request_again(
    installation: ScriptedInstallation, unknown: dict[str, Any]
) -> None:
    installation.start("executor")
    released = installation.stopped(unknown["id"])
    assert [replica["outcome"] for replica in released["replicas"]] == ["unknown"] * 2
    answer = start(installation, unknown)
    assert (answer.status, answer.code) == (409, "inference_unknown_outcome")

    started = start(installation, unknown, acknowledge_unknown=True).ok(202)
    assert started["generation"] == unknown["generation"] + 1
    ready = installation.settled(unknown["id"], "ready", "failed")
    assert ready["state"] == "ready", ready["reason"]
    assert not {r["attempt_id"] for r in ready["replicas"]} & {r["attempt_id"] for r in unknown["replicas"]}
    assert installation.chat(unknown["id"], key="another").status == 200
    assert installation.times(unknown["id"], "another") == 1
    assert [installation.times(unknown["id"], f"request {n}") for n in range(2)] == [0, 0]
    installation.remove(unknown["id"])
