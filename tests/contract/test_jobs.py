"""Batch jobs of contributors: submitted through the API, also to an executor from before endpoints existed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation
from support.executor import PYTHON

pytestmark = pytest.mark.timeout(240)

OLDER = Path(__file__).parents[1] / "support" / "older"
LIMITS = {"cpu_millis": 200, "memory_bytes": 96 << 20, "processes": 24, "storage_bytes": 1 << 20}


def job(installation: ScriptedInstallation, script: str, **changes: Any) -> dict[str, Any]:
    return {
        "node_id": installation.node_id,
        "runtime": installation.python,
        "argv": [PYTHON, "-IBc", script],
        "limits": LIMITS,
        "deadline_seconds": 60,
        **changes,
    }


def ended(installation: ScriptedInstallation, workload_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        record = installation.http("GET", f"/workloads/{workload_id}").ok()
        return record if record["state"] == "ended" and record["released"] else None

    found: dict[str, Any] | None = installation.until(look, f"{workload_id} is released")
    assert found is not None
    return found


@pytest.mark.contract("C-R8")
def test_a_job_runs_on_its_node_and_has_the_outcome_of_its_command(scripted: ScriptedInstallation) -> None:
    outcomes = []
    for status in (0, 3):
        made = scripted.http("POST", "/workloads", job(scripted, f"raise SystemExit({status})")).ok(202)
        outcomes.append(ended(scripted, made["id"])["outcome"])
    assert outcomes == ["succeeded", "failed"]


@pytest.mark.contract("C-R3", "C-R4", "C-R8")
def test_the_plan_of_a_job_is_one_without_the_newer_members(scripted: ScriptedInstallation) -> None:
    """Its digest is of these bytes: members sorted by name, nothing spaced, what is absent left out."""
    made = scripted.http("POST", "/workloads", job(scripted, "pass", environment={"A": "b"})).ok(202)
    runtime = ",".join(f'"{name}":"{scripted.python[name]}"' for name in sorted(scripted.python))
    text = (
        f'{{"argv":["{PYTHON}","-IBc","pass"],"environment":{{"A":"b"}},"inputs":[],'
        '"limits":{"cpu_millis":200,"gpu_devices":[],"memory_bytes":100663296,"processes":24,'
        '"storage_bytes":1048576,"storage_inodes":1024,"swap_bytes":0},'
        f'"node_id":"{scripted.node_id}","outputs":[],"plan_version":1,'
        f'"runtime":{{{runtime}}},"sensitive":false}}'
    )
    assert made["plan_digest"] == hashlib.sha256(text.encode()).hexdigest()
    assert made["plan"] == json.loads(text)
    ended(scripted, made["id"])


@pytest.mark.contract("C-R3")
def test_a_replica_is_listed_among_the_workloads(scripted: ScriptedInstallation) -> None:
    service = scripted.service("listed")
    (replica,) = service["replicas"]
    listed = {one["id"]: one for one in scripted.http("GET", "/workloads").ok()["items"]}
    workload = listed[replica["workload_id"]]
    assert workload["service_id"] == service["id"]
    assert workload["plan_digest"] == replica["plan_digest"]
    assert workload["model_revision"] == replica["model_revision"]
    assert scripted.http("GET", f"/workloads/{workload['id']}").ok()["plan"]["endpoint"]["concurrency"] == 2
    scripted.remove(service["id"])
    assert scripted.http("GET", f"/workloads/{workload['id']}").code == "not_found"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    """An installation whose real executor says nothing of `endpoint_version`."""
    made = ScriptedInstallation(tmp_path_factory.mktemp("older"))
    ordinary = made.environment["PYTHONPATH"]
    try:
        made.environment["PYTHONPATH"] = os.pathsep.join((str(OLDER), ordinary))
        made.start("executor")
        made.environment["PYTHONPATH"] = ordinary
        made.start("controller")
        yield made
    finally:
        made.stop()


@pytest.mark.contract("C-R6", "C-R7")
def test_l15_an_older_executor_runs_jobs_and_is_refused_for_inference(older: ScriptedInstallation) -> None:
    assert older.node()["endpoint_version"] is None
    refused = older.http("POST", "/inference", older.spec("older"))
    assert (refused.status, refused.code) == (409, "does_not_fit")
    (problem,) = refused.json["error"]["problems"]
    assert problem["code"] == "endpoint_unsupported"
    assert "runs jobs" in problem["message"]
    made = older.http("POST", "/workloads", job(older, "print('as before')")).ok(202)
    assert ended(older, made["id"])["outcome"] == "succeeded"
