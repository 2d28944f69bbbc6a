"""Services that come back by themselves: an engine that exits, cannot load or stops answering is tried again, bounded
and after growing pauses; never after an outcome that nobody knows, unless somebody acknowledged that beforehand."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import HERE, Open, ScriptedInstallation
from ficc.controller.reconcilers.liveness import ASKS
from ficc.domain.lease import SECOND, patience_ns
from support.engine_answers import signal_engine

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

TTL_SECONDS = 5
LIVENESS_SECONDS = 3
LEASE_OVER_SECONDS = patience_ns(TTL_SECONDS) / SECOND
BUSY_SECONDS = 20.0
"""What a busy machine may add."""
QUICK = {"delay_seconds": 1, "factor": 1, "failures_max": 3}
FAULTY = """\
import sys
print("loading the scripted model", flush=True)
print("error: tensor 'blk.0' is missing", file=sys.stderr, flush=True)
sys.exit(1)
"""
SETTINGS = {
    "FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS),
    "FICC_LIFECYCLE_LIVENESS_SECONDS": str(LIVENESS_SECONDS),
    "FICC_LIFECYCLE_RESTART_DELAY_SECONDS": "1",
}


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(tmp_path, settings=SETTINGS) as made:
        yield made


def replica(installation: ScriptedInstallation, service_id: str, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = installation.record(service_id)["replicas"][number]
    return found


def attempt(
    installation: ScriptedInstallation, service_id: str, number: int, *states: str, seconds: float = 40.0
) -> dict[str, Any]:
    """The replica once its attempt of this number is in one of these states."""

    def look() -> dict[str, Any] | None:
        found = replica(installation, service_id)
        assert found["attempt"] <= number, f"one attempt too many: {found}"
        there = found["attempt"] == number and (not states or found["state"] in states)
        return found if there else None

    found = installation.until(look, f"attempt {number} is there", seconds=seconds)
    assert found is not None
    return found


def serves(installation: ScriptedInstallation, service_id: str, number: int) -> None:
    """Wait until the attempt of this number is ready, and then its service, which follows its replicas."""
    attempt(installation, service_id, number, "ready")
    installation.settled(service_id, "ready")


def why(found: dict[str, Any]) -> str:
    return str(found["reason"]["message"])


def reboot(installation: ScriptedInstallation) -> None:
    """Both processes end at once, and the next boot of the machine is another one by the executor's ledger."""
    installation.kill("controller")
    installation.kill("executor")
    with closing(sqlite3.connect(installation.directory / "executor" / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE attempts SET boot_id = 'an earlier boot'")
    installation.start()
    installation.node()


# Engines that end.


def test_l1_an_engine_that_is_killed_is_replaced_within_its_service(
    installation: ScriptedInstallation,
) -> None:
    service = installation.service("two", replicas=2)
    first = service["replicas"][0]["attempt_id"]
    signal_engine(first, signal.SIGKILL)
    degraded = installation.settled(service["id"], "degraded")
    assert degraded["replicas"][1]["state"] == "ready"
    ended = degraded["replicas"][0]
    assert (ended["attempt_id"], ended["error"]["code"]) == (first, "engine_killed")
    assert ended["reason"]["code"] == "restart_pending"
    assert "after failure 1 of at most 5 in a row" in ended["reason"]["message"]
    assert installation.chat(service["id"]).status == 200
    ready = installation.settled(service["id"], "ready")
    assert (ready["generation"], ready["replicas"][0]["attempt"]) == (service["generation"], 2)
    assert ready["replicas"][1]["attempt_id"] == service["replicas"][1]["attempt_id"]


def test_l10_an_engine_that_cannot_load_is_tried_a_few_times_and_says_why(
    installation: ScriptedInstallation,
) -> None:
    """It fails with the engine's own words; its earlier logs stay readable, also once it is stopped."""
    faulty = installation.directory / "faulty.gguf"
    faulty.write_text(FAULTY)
    model_id = installation.add_model(faulty, "faulty", ["chat"])["id"]
    spec = installation.spec("faulty", model_id=model_id, restart={"on_failure": QUICK})
    made = installation.http("POST", "/inference", spec).ok(202)
    pending = attempt(installation, made["id"], 1, "finished")
    assert (installation.record(made["id"])["state"], pending["outcome"]) == ("starting", "failed")
    assert pending["reason"]["code"] == "restart_pending"
    assert "tensor 'blk.0' is missing" in why(pending)
    failed = installation.settled(made["id"], "failed")
    assert failed["desired"] == "running"
    assert failed["reason"]["code"] == "engine_exited"
    assert "tensor 'blk.0' is missing" in failed["reason"]["message"]
    assert failed["replicas"][0]["attempt"] == 3
    assert failed["replicas"][0]["error"] == failed["reason"]

    installation.stopped(made["id"])
    installation.control(made["id"], "stop").ok(202)
    for number in (1, 2, 3):
        log = installation.http("GET", f"/inference/{made['id']}/logs", attempt=str(number)).ok()
        assert log["attempt"] == number
        assert "tensor 'blk.0' is missing" in log["text"]
        assert [one["attempt"] for one in log["attempts"]] == [3, 2, 1]
    missing = installation.http("GET", f"/inference/{made['id']}/logs", attempt="4")
    assert (missing.status, missing.code, missing.param) == (404, "not_found", "attempt")
    assert installation.record(made["id"])["replicas"][0]["attempt"] == 3

    # The next generation begins anew, and what the earlier one said can be read beside.
    installation.control(made["id"], "start").ok(202)
    assert installation.settled(made["id"], "failed")["replicas"][0]["attempt"] == 3
    log = installation.http("GET", f"/inference/{made['id']}/logs").ok()
    assert (log["generation"], log["attempt"]) == (2, 3)
    kept = [(one["generation"], one["attempt"]) for one in log["attempts"]]
    assert kept == [(2, 3), (2, 2), (2, 1), (1, 3), (1, 2)]
    older = installation.http("GET", f"/inference/{made['id']}/logs", attempt="2", generation="1").ok()
    assert older["attempt_id"] == log["attempts"][4]["attempt_id"]


def test_never_means_that_nothing_is_tried_again(installation: ScriptedInstallation) -> None:
    service = installation.service("once", restart="never")
    installation.chat(service["id"], do="die")
    failed = installation.settled(service["id"], "failed")
    assert failed["reason"]["code"] == "engine_exited"
    time.sleep(2)  # the reconciler looks every second
    assert replica(installation, service["id"])["attempt"] == 1


def test_the_count_of_failures_survives_a_controller_and_a_stable_run_begins_it_anew(
    installation: ScriptedInstallation,
) -> None:
    policy = {"delay_seconds": 4, "factor": 1, "failures_max": 3, "stable_seconds": 6}
    service_id = installation.service("counted", restart={"on_failure": policy})["id"]
    installation.chat(service_id, do="die")
    installation.until(lambda: replica(installation, service_id)["released"], "it is released")
    pending = attempt(installation, service_id, 1, "finished")
    installation.kill("controller")
    installation.start("controller")
    assert replica(installation, service_id)["reason"] == pending["reason"]
    assert "after failure 1 of at most 3" in why(pending)

    serves(installation, service_id, 2)
    installation.chat(service_id, do="die")
    assert "after failure 2 of at most 3" in why(attempt(installation, service_id, 2, "finished"))
    serves(installation, service_id, 3)
    time.sleep(7)  # stable
    installation.chat(service_id, do="die")
    assert "after failure 1 of at most 3" in why(attempt(installation, service_id, 3, "finished"))
    serves(installation, service_id, 4)


# Engines that stop answering.


def test_an_engine_that_hangs_is_replaced(installation: ScriptedInstallation) -> None:
    """Its process is there, and does nothing at all."""
    service_id = installation.service("frozen", engine="watched")["id"]
    first = replica(installation, service_id)["attempt_id"]
    signal_engine(first, signal.SIGSTOP)
    ended = attempt(installation, service_id, 1, "finished", seconds=2 * LIVENESS_SECONDS + BUSY_SECONDS)
    assert ended["error"]["code"] == "engine_unresponsive"
    assert installation.settled(service_id, "ready")["replicas"][0]["attempt"] == 2
    assert installation.chat(service_id).status == 200


def test_an_engine_whose_server_answers_and_that_does_no_work_is_replaced(
    installation: ScriptedInstallation,
) -> None:
    """As one whose device hangs. Callers that give up early are as good a sign as those that wait."""
    service_id = installation.service("wedged", engine="watched", deadline_seconds=2)["id"]
    assert installation.chat(service_id, do="wedge").code == "deadline_exceeded"
    ended = attempt(installation, service_id, 1, "finished", seconds=4 * LIVENESS_SECONDS + BUSY_SECONDS)
    assert ended["error"]["code"] == "engine_unresponsive"
    serves(installation, service_id, 2)


@pytest.mark.parametrize("engine_name", ["watched", "scripted"])
def test_a_saturated_engine_is_not_dead(installation: ScriptedInstallation, engine_name: str) -> None:
    """Every slot is taken by work without a word for longer than silence is allowed, and nobody loses a slot."""
    service_id = installation.service("busy", engine=engine_name, deadline_seconds=30)["id"]
    work = [Open(installation, service_id, do="occupy", seconds=1.5 * LIVENESS_SECONDS) for _ in range(2)]
    for one in work:
        assert one.answer().status == 200
    assert replica(installation, service_id)["attempt"] == 1


def test_an_idle_engine_is_asked_for_nothing_but_a_sign_of_life(installation: ScriptedInstallation) -> None:
    service_id = installation.service("idle", engine="watched")["id"]
    time.sleep(2 * LIVENESS_SECONDS)
    assert replica(installation, service_id)["attempt"] == 1
    told = installation.report(service_id)
    assert told["alive"] >= ASKS
    assert told["requests"] == 2  # whether it is ready, and this one


# Interruptions.


def test_l2_a_node_that_was_cut_off_past_its_lease_takes_its_service_up_again(
    installation: ScriptedInstallation,
) -> None:
    """The controller holds the lease to be over and nobody knows the outcome; then the node comes back and says that
    it ended the engine itself: the service was only interrupted."""
    service_id = installation.service("cut")["id"]
    executor = installation.processes["executor"]
    executor.send_signal(signal.SIGSTOP)
    try:
        failed = installation.settled(service_id, "failed", seconds=LEASE_OVER_SECONDS + BUSY_SECONDS)
        assert failed["replicas"][0]["outcome"] == "unknown"
        assert failed["desired"] == "running"
    finally:
        executor.send_signal(signal.SIGCONT)
    ready = installation.settled(service_id, "ready")
    assert (ready["generation"], ready["replicas"][0]["attempt"]) == (1, 2)


def test_l5_a_reboot_leaves_the_outcome_unknown_and_the_service_waits_for_an_acknowledgement(
    installation: ScriptedInstallation,
) -> None:
    service_id = installation.service("rebooted")["id"]
    reboot(installation)
    failed = installation.settled(service_id, "failed", seconds=LEASE_OVER_SECONDS + BUSY_SECONDS)
    assert (failed["replicas"][0]["outcome"], failed["reason"]["code"]) == ("unknown", "node_rebooted")
    time.sleep(2)
    assert replica(installation, service_id)["attempt"] == 1
    assert installation.control(service_id, "start").code == "inference_unknown_outcome"
    installation.until(lambda: replica(installation, service_id)["released"], "it is released")
    body = {"revision": installation.record(service_id)["revision"], "spec": installation.spec("rebooted")}
    answer = installation.http("PUT", f"/inference/{service_id}", body)
    assert (answer.status, answer.code) == (409, "inference_unknown_outcome")
    installation.http("PUT", f"/inference/{service_id}", {**body, "acknowledge_unknown": True}).ok(202)
    assert installation.settled(service_id, "ready")["generation"] == 2


def test_l5_a_standing_acknowledgement_brings_a_service_back_after_a_reboot(
    installation: ScriptedInstallation,
) -> None:
    installation.environment["FICC_LIFECYCLE_ACKNOWLEDGE_UNKNOWN_ON_BOOT"] = "true"
    service_id = installation.service("returns", restart="never")["id"]
    before = replica(installation, service_id)
    reboot(installation)
    after = attempt(installation, service_id, 2, "ready", seconds=LEASE_OVER_SECONDS + BUSY_SECONDS)
    assert after["generation"] == before["generation"]
    with closing(sqlite3.connect(installation.directory / "controller" / "ficc.sqlite")) as db:
        (row,) = db.execute("SELECT authority_kind, action, object_id, details FROM audit").fetchall()
    assert row[:3] == ("setting", "service.acknowledge_unknown", service_id)
    assert before["attempt_id"] in row[3]


# While an engine loads.


def test_what_an_engine_says_while_it_loads_is_the_replicas_reason(
    installation: ScriptedInstallation,
) -> None:
    slow = installation.directory / "slow.gguf"
    slow.write_text(
        "import time\nprint('\\x1b[32mreading tensor 7 of 9\\x1b[0m\\n......', flush=True)\ntime.sleep(6)\n"
        + (HERE / "engine.py").read_text()
    )
    model_id = installation.add_model(slow, "slow", ["chat"])["id"]
    made = installation.http("POST", "/inference", installation.spec("slow", model_id=model_id)).ok(202)
    shown = installation.until(
        lambda: (now := replica(installation, made["id"]))["state"] == "starting" and now["reason"],
        "it says so",
    )
    assert shown == {"code": "engine_loading", "message": "reading tensor 7 of 9"}
    ready = installation.settled(made["id"], "ready")
    assert ready["replicas"][0]["reason"] is None
