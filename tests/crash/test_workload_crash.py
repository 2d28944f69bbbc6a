"""Jobs and replicas whose controller, executor or node goes away: nothing is run twice, an outcome that nobody saw is
`unknown`, and what a node will not give back an operator releases once its lease is over."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation
from ficc.identifiers import new_id
from support.executor import is_alive
from support.http import caller_with
from support.jobs import SLEEP, JobInstallation

pytestmark = pytest.mark.timeout(240)

TTL_SECONDS = 10
"""Where a test waits for the end of a lease."""
OVER_SECONDS = TTL_SECONDS + 60
"""By when a lease that is not renewed any more is surely held to be over."""


@pytest.fixture
def settings() -> dict[str, str]:
    return {}


@pytest.fixture
def short_leases(settings: dict[str, str]) -> None:
    settings["FICC_LEASES_TTL_SECONDS"] = str(TTL_SECONDS)


@pytest.fixture
def made(settings: dict[str, str], tmp_path: Path) -> Iterator[JobInstallation]:
    with JobInstallation(tmp_path, settings=settings) as installation:
        yield installation


# The controller.


@pytest.mark.parametrize(
    "point",
    [
        "controller.admit_recorded",
        "controller.admit_answered",
        "controller.start_intended",
        "controller.start_sent",
    ],
)
def test_a_controller_that_is_killed_on_a_jobs_way_runs_it_once(made: JobInstallation, point: str) -> None:
    """L7: also where it may have been started and no answer came, which only its executor can tell. A start that was
    recorded and not sent is no more sent: then the job is cancelled, and says so."""
    document = made.job("print('once')", idempotency_key="one")
    made.kill("controller", signal.SIGTERM)
    made.environment["FICC_FAILPOINT"] = point
    made.start("controller")
    made.node()
    del made.environment["FICC_FAILPOINT"]
    with suppress(OSError, http.client.HTTPException):
        made.http("POST", "/workloads", document)
    assert made.processes.pop("controller").wait(30) == -signal.SIGKILL
    made.start("controller")
    made.node()
    job = made.http("POST", "/workloads", document).ok(200)["id"]  # whoever asks again asks for the same one
    outcome = made.outcome(job)
    if outcome == ("cancelled", "start_not_confirmed"):
        assert point in ("controller.start_intended", "controller.start_sent")
        assert made.part(job, stream="log").ok()["bytes_total"] == 0
    else:
        assert outcome == ("succeeded", "exited")
        assert made.log(job) == "once\n"
    assert len(made.record(job)["attempts"]) == 1


# The executor.


def test_l4_a_job_whose_executor_restarts_has_failed_and_can_be_tried_again(made: JobInstallation) -> None:
    """Whether it was killed, or ended just before, is only known if the watchdog saw it alive."""
    job = made.submitted(SLEEP)
    made.in_state(job, "running")
    made.kill("executor")
    made.start("executor")
    made.node()
    outcome = made.outcome(job)
    assert outcome in {("failed", "executor_restarted"), ("unknown", "end_not_observed")}
    made.act(job, "retry", **({"acknowledge_unknown": True} if outcome[0] == "unknown" else {})).ok(202)
    again = made.in_state(job, "running")
    assert [one["attempt"] for one in again["attempts"]] == [2, 1]
    made.act(job, "cancel").ok(202)
    assert made.outcome(job) == ("cancelled", "job_cancelled")


def test_a_job_whose_end_nobody_saw_is_tried_again_with_open_eyes_only(made: JobInstallation) -> None:
    """The executor hangs while the command ends by itself, and never comes to see it."""
    job = made.submitted("import time; time.sleep(1)")
    attempt_id = made.in_state(job, "running")["attempts"][0]["attempt_id"]
    os.kill(made.processes["executor"].pid, signal.SIGSTOP)
    made.until(lambda: not _processes(attempt_id), "the command has ended")
    made.kill("executor")
    made.start("executor")
    made.node()
    assert made.outcome(job) == ("unknown", "end_not_observed")
    refused = made.act(job, "retry")
    assert (refused.status, refused.code, refused.param) == (409, "unknown_outcome", "acknowledge_unknown")
    assert made.act(job, "retry", acknowledge_unknown=False).code == "unknown_outcome"
    again = made.act(job, "retry", acknowledge_unknown=True).ok(202)
    assert again["attempts"][1]["outcome"] == "unknown"
    assert made.outcome(job) == ("succeeded", "exited")


def _processes(attempt_id: str) -> list[Path]:
    """Of an attempt's control group, alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with suppress(OSError):
            if attempt_id in path.read_text() and is_alive(int(path.parent.name)):
                found.append(path)
    return found


# A node that does not come back.


@pytest.mark.usefixtures("short_leases")
def test_what_a_job_holds_on_a_node_that_is_gone_is_released_once_its_lease_is_over(
    made: JobInstallation,
) -> None:
    job = made.submitted(SLEEP)
    made.in_state(job, "running")
    made.kill("executor")
    made.until(lambda: not _connected(made), "the node is gone")
    early = made.act(job, "release", acknowledge_unknown=True)
    assert early.code == "lease_not_over"
    assert 0 < int(early.headers["retry-after"]) <= TTL_SECONDS + 16
    assert early.json["error"]["lease_over_at"] > made.record(job)["created_at"]
    lost = made.in_state(job, "ended", seconds=OVER_SECONDS)
    assert (lost["outcome"], lost["reason"]["code"], lost["released"]) == ("unknown", "lease_over", False)
    assert made.act(job, "remove").code == "attempt_not_released"
    assert made.act(job, "retry", acknowledge_unknown=True).code == "attempt_not_released"

    body = {"revision": lost["revision"], "acknowledge_unknown": True}
    for wrong in ({"revision": lost["revision"]}, {**body, "acknowledge_unknown": False}):
        assert made.http("POST", f"/workloads/{job}/release", wrong).param == "acknowledge_unknown"
    stale = made.http("POST", f"/workloads/{job}/release", {**body, "revision": 0})
    assert stale.code == "revision_conflict"
    assert made.http("GET", "/audit").ok()["items"] == []  # what is refused is no deed

    request = {"x-request-id": f"release {new_id()}".replace(" ", "-")}
    released = made.http("POST", f"/workloads/{job}/release", body, headers=request).ok()
    assert (released["released"], released["outcome"]) == (True, "unknown")
    assert not made.http("GET", "/contributors").ok()["items"][0]["reserved"]["memory_bytes"]
    (entry,) = made.http("GET", "/audit").ok()["items"]
    attempt_id = released["attempts"][0]["attempt_id"]
    assert entry["action"] == "workload.release"
    assert entry["object"] == {"kind": "workload", "id": job}
    assert entry["request_id"] == request["x-request-id"]
    assert entry["outcome"] == "released"
    assert entry["details"]["attempts"] == {attempt_id: "unknown"}
    owner = made.http("GET", "/session").ok()
    assert entry["subject_id"] == owner["principal"]["id"]
    assert entry["authority"] == {"kind": "token", "id": owner["session_id"]}
    assert caller_with(made, "jobs:read")("GET", "/audit").param == "audit:read"

    assert made.act(job, "retry", acknowledge_unknown=True).code == "does_not_fit"  # there is no node
    made.start(
        "executor"
    )  # it comes back after all: nothing of the attempt runs, and nothing is doubted again
    made.node()
    assert made.record(job)["attempts"] == released["attempts"]
    made.act(job, "retry", acknowledge_unknown=True).ok(202)
    made.in_state(job, "running")
    made.act(job, "cancel").ok(202)
    made.ended(job)
    made.act(job, "remove").ok()
    assert len(made.http("GET", "/audit").ok()["items"]) == 1  # the audit outlives what it is about


@pytest.mark.usefixtures("short_leases")
def test_a_deadline_that_passes_on_a_node_that_is_gone_leaves_the_outcome_unknown(
    made: JobInstallation,
) -> None:
    job = made.submitted(SLEEP, deadline_seconds=10)
    made.in_state(job, "running")
    made.kill("executor")
    stopping = made.in_state(job, "stopping")
    assert stopping["reason"]["code"] == "deadline_exceeded"
    lost = made.in_state(job, "ended", seconds=OVER_SECONDS)
    assert (lost["outcome"], lost["reason"]["code"]) == ("unknown", "lease_over")

    made.start("executor")  # and what it knows, if it does, is known then
    made.node()

    def agrees() -> bool:
        record = made.record(job)
        newest = record["attempts"][0]
        return bool(record["released"]) and record["reason"] == newest["reason"] != lost["reason"]

    made.until(agrees, "the job says what its executor knows")
    assert made.outcome(job) in {("failed", "executor_restarted"), ("unknown", "end_not_observed")}


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedInstallation]:
    with ScriptedInstallation(
        tmp_path, settings={"FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS)}
    ) as installation:
        yield installation


def test_a_service_whose_node_is_gone_for_ever_starts_again_once_its_replicas_are_released(
    scripted: ScriptedInstallation,
) -> None:
    made = scripted
    service = made.service("assistant")
    replica = service["replicas"][0]
    workload = made.http("GET", f"/workloads/{replica['workload_id']}").ok()
    assert (workload["service_id"], workload["generation"], workload["replica"]) == (service["id"], 1, 0)
    assert workload["model_revision"] == replica["model_revision"]
    assert (workload["state"], workload["released"]) == ("running", False)
    assert replica["workload_id"] in {one["id"] for one in made.http("GET", "/workloads").ok()["items"]}
    for action in ("cancel", "retry", "remove"):
        body = {"revision": workload["revision"]}
        refused = made.http("POST", f"/workloads/{replica['workload_id']}/{action}", body)
        assert (refused.code, refused.json["error"]["service_id"]) == ("action_not_allowed", service["id"])

    made.kill("executor")
    made.control(service["id"], "stop").ok(202)
    stopped = made.settled(service["id"], "stopped", "failed", seconds=OVER_SECONDS)
    assert stopped["replicas"][0]["outcome"] == "unknown"
    _become_another_node(made)
    made.start("executor")
    fresh = _until_connected(made, lambda node: node["id"] != replica["node_id"])
    spec = {**service["spec"], "placements": [{**service["spec"]["placements"][0], "node_id": fresh["id"]}]}

    def replace() -> Any:
        body = {
            "revision": made.record(service["id"])["revision"],
            "spec": spec,
            "acknowledge_unknown": True,
        }
        return made.http("PUT", f"/inference/{service['id']}", body)

    assert replace().code == "attempt_not_released"
    revision = made.http("GET", f"/workloads/{replica['workload_id']}").ok()["revision"]
    body = {"revision": revision, "acknowledge_unknown": True}
    released = made.http("POST", f"/workloads/{replica['workload_id']}/release", body).ok()
    assert (released["state"], released["outcome"], released["released"]) == ("ended", "unknown", True)
    (entry,) = made.http("GET", "/audit").ok()["items"]
    assert entry["details"]["service_id"] == service["id"]
    replace().ok(202)
    again = made.settled(service["id"], "ready", "failed")
    assert (again["state"], again["replicas"][0]["node_id"]) == ("ready", fresh["id"])


def _connected(made: JobInstallation) -> bool:
    return bool(made.http("GET", "/contributors").ok()["items"][0]["connected"])


def _until_connected(made: ScriptedInstallation, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = made.http("GET", "/contributors").ok()["items"]
        return next((node for node in found if node["connected"] and wanted(node)), None)

    node = made.until(look, "another node is connected")
    assert node is not None
    return node


def _become_another_node(made: ScriptedInstallation) -> None:
    """The machine was set up anew: it knows nothing of what it was."""
    for path in (made.directory / "executor").glob("ledger.sqlite*"):
        path.unlink()
