"""Batch jobs over the API, in real sandboxes: submission, outcomes, control, outputs, and who may see what."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ficc.domain.access import SCOPES
from ficc.identifiers import new_id
from support.http import caller_with, projects_of
from support.jobs import LIMITS, SLEEP, JobInstallation
from support.rows import random_bytes

pytestmark = pytest.mark.timeout(240)

WRITE = "import pathlib; pathlib.Path('/run/ficc/{}').write_bytes({!r})"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobInstallation]:
    with JobInstallation(tmp_path_factory.mktemp("ficc")) as installation:
        yield installation


@pytest.fixture(scope="module")
def data(made: JobInstallation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A verified file of the project."""
    path = tmp_path_factory.mktemp("data") / "data.gguf"
    path.write_bytes(b"some numbers: 17 25")
    return {"name": "data", "sha256": made.add_model(path, "data")["files"][0]["sha256"]}


def until_unreserved(made: JobInstallation) -> None:
    made.until(lambda: not made.node()["reserved"]["memory_bytes"], "the reservation is back")


# Its life.


def test_a_command_that_exits_with_0_has_succeeded(made: JobInstallation) -> None:
    answer = made.http("POST", "/workloads", made.job("print('done')"))
    job = answer.ok(202)
    assert (job["state"], job["outcome"], job["released"]) == ("queued", None, False)
    assert (job["service_id"], job["generation"], job["replica"]) == (None, None, None)
    ended = made.ended(job["id"])
    assert (ended["outcome"], ended["reason"]["code"]) == ("succeeded", "exited")
    (attempt,) = ended["attempts"]
    assert (attempt["attempt"], attempt["state"], attempt["outcome"]) == (1, "released", "succeeded")
    assert ended["plan_digest"] == job["plan_digest"]
    assert made.log(job["id"]) == "done\n"
    until_unreserved(made)


def test_a_command_that_exits_otherwise_has_failed_with_its_last_words(made: JobInstallation) -> None:
    job = made.submitted("import sys; sys.exit('no such number')")
    ended = made.ended(job)
    assert (ended["outcome"], ended["reason"]["code"]) == ("failed", "engine_exited")
    assert "The command exited with status 1." in ended["reason"]["message"]
    assert "no such number" in ended["reason"]["message"]


def test_a_job_runs_while_it_lasts_and_is_cancelled(made: JobInstallation) -> None:
    job = made.submitted(SLEEP)
    running = made.in_state(job, "running")
    assert running["attempts"][0]["state"] == "running"
    assert made.node()["reserved"]["memory_bytes"] == LIMITS["memory_bytes"]
    stopping = made.act(job, "cancel").ok(202)
    assert (stopping["state"], stopping["reason"]["code"]) == ("stopping", "job_cancelled")
    assert made.act(job, "cancel").status == 202 or made.record(job)["state"] == "ended"
    assert made.outcome(job) == ("cancelled", "job_cancelled")
    assert made.act(job, "cancel").code == "action_not_allowed"
    until_unreserved(made)


def test_a_job_that_outlives_its_deadline_has_failed(made: JobInstallation) -> None:
    job = made.submitted(SLEEP, deadline_seconds=1)
    assert made.outcome(job) == ("failed", "deadline_exceeded")
    assert made.record(job)["attempts"][0]["reason"]["code"] == "deadline_exceeded"


def test_leases_are_renewed_under_a_job(tmp_path: Path) -> None:
    """It runs for longer than a lease lasts."""
    with JobInstallation(tmp_path, settings={"FICC_LEASES_TTL_SECONDS": "5"}) as made:
        job = made.submitted("import time; time.sleep(8)")
        assert made.outcome(job) == ("succeeded", "exited")


def test_a_job_that_has_ended_is_tried_again_when_somebody_asks(made: JobInstallation) -> None:
    job = made.submitted("import sys; print('once'); sys.exit(3)")
    assert made.outcome(job) == ("failed", "engine_exited")
    first = made.record(job)
    again = made.act(job, "retry").ok(202)
    assert (again["state"], again["outcome"], again["reason"]) == ("queued", None, None)
    assert again["revision"] > first["revision"]
    assert again["plan_digest"] == first["plan_digest"]
    assert [one["attempt"] for one in again["attempts"]] == [2, 1]
    assert made.outcome(job) == ("failed", "engine_exited")
    assert [made.log(job, attempt=number) for number in (1, 2)] == ["once\n", "once\n"]
    stale = made.http("POST", f"/workloads/{job}/retry", {"revision": first["revision"]})
    assert stale.code == "revision_conflict"
    assert made.part(job, stream="log", attempt=3).code == "not_found"


def test_a_job_that_goes_on_is_neither_tried_again_nor_removed(made: JobInstallation) -> None:
    job = made.submitted(SLEEP)
    made.in_state(job, "running")
    assert made.act(job, "retry").code == "action_not_allowed"
    assert made.act(job, "remove").code == "action_not_allowed"
    lease = made.act(job, "release", acknowledge_unknown=True)
    assert lease.code == "attempt_not_released"  # its node is here and has it
    made.act(job, "cancel").ok(202)
    made.ended(job)
    assert made.act(job, "release", acknowledge_unknown=True).code == "action_not_allowed"


def test_a_removed_job_is_gone_with_what_it_left(made: JobInstallation) -> None:
    job = made.submitted(WRITE.format("out", b"x") + "; print('words')", outputs=["out"])
    attempt_id = made.ended(job)["attempts"][0]["attempt_id"]
    executor = made.directory / "executor"
    assert (executor / "outputs" / attempt_id).is_dir()
    assert made.act(job, "remove").ok() == {"removed": True}
    assert made.http("GET", f"/workloads/{job}").code == "not_found"
    assert job not in {one["id"] for one in made.http("GET", "/workloads").ok()["items"]}
    assert not (executor / "outputs" / attempt_id).exists()
    assert not list((executor / "logs").glob(f"{attempt_id}*"))


# Inputs and outputs.


def test_a_job_reads_verified_files_and_leaves_what_it_names(
    made: JobInstallation, data: dict[str, Any]
) -> None:
    script = (
        "import os, pathlib\n"
        "text = pathlib.Path('/inputs/in/numbers.txt').read_text()\n"
        "os.makedirs('/run/ficc/deep')\n"
        "total = sum(map(int, text.split(':')[1].split()))\n"
        "pathlib.Path('/run/ficc/deep/sum.txt').write_text(str(total))\n"
    )
    given = [{"name": "in/numbers.txt", "sha256": data["sha256"]}]
    job = made.submitted(script, inputs=given, outputs=["deep/sum.txt", "never.txt"])
    made.ended(job)
    assert made.output(job, "deep/sum.txt") == b"42"
    missing = made.part(job, name="never.txt")
    assert (missing.code, missing.param) == ("not_found", "name")
    assert "did not write it" in missing.json["error"]["message"]
    assert made.part(job, name="/inputs/in/numbers.txt").code == "not_found"
    (entry,) = made.record(job)["plan"]["inputs"]
    assert (entry["name"], entry["bytes"]) == ("in/numbers.txt", 19)


def test_a_large_output_is_read_in_parts_of_at_most_1_mib(made: JobInstallation) -> None:
    script = (
        "import hashlib\n"
        "data = b''.join(hashlib.sha256(b'%d' % n).digest() for n in range(100_000))[:3_000_001]\n"
        "open('/run/ficc/large', 'wb').write(data)\n"
        "print(hashlib.sha256(data).hexdigest())\n"
    )
    job = made.submitted(script, outputs=["large"])
    assert made.outcome(job) == ("succeeded", "exited")
    first = made.part(job, name="large", limit=1 << 20).ok()
    assert (first["bytes_total"], first["next_offset"], first["truncated"]) == (3_000_001, 1 << 20, False)
    found = made.output(job, "large", limit=1 << 20)
    assert hashlib.sha256(found).hexdigest() == made.log(job).strip()
    assert made.part(job, name="large", limit=(1 << 20) + 1).param == "limit"


def test_outputs_of_a_failed_job_are_kept_too(made: JobInstallation) -> None:
    job = made.submitted(WRITE.format("half", b"so far") + "; raise SystemExit(1)", outputs=["half"])
    assert made.outcome(job) == ("failed", "engine_exited")
    assert made.output(job, "half") == b"so far"


def test_nothing_that_a_command_links_to_is_read(made: JobInstallation) -> None:
    script = (
        "import os\n"
        "os.symlink('/etc/passwd', '/run/ficc/absolute')\n"
        "os.symlink('../../../../../../etc', '/run/ficc/etc')\n"
        "os.mkfifo('/run/ficc/pipe')\n"
    )
    names = ["absolute", "etc/passwd", "pipe"]
    job = made.submitted(script, outputs=names)
    assert made.outcome(job) == ("succeeded", "exited")
    for name in names:
        assert "cannot be read" in made.part(job, name=name).json["error"]["message"]


def test_an_output_is_there_once_the_attempt_has_ended_and_a_log_at_once(made: JobInstallation) -> None:
    job = made.submitted(f"print('begun', flush=True); {SLEEP}", outputs=["out"])
    made.in_state(job, "running")
    made.until(lambda: made.log(job) == "begun\n", "it says something")
    assert made.part(job, name="out").code == "action_not_allowed"
    made.act(job, "cancel").ok(202)
    made.ended(job)
    assert "did not write it" in made.part(job, name="out").json["error"]["message"]


@pytest.mark.parametrize("wanted", [{}, {"name": "out", "stream": "log"}])
def test_either_a_name_or_the_log_is_read(made: JobInstallation, wanted: dict[str, str]) -> None:
    job = made.submitted()
    made.ended(job)
    answer = made.part(job, **wanted)
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "name")


def test_a_digest_that_the_project_has_not_verified_is_refused(
    made: JobInstallation, data: dict[str, Any]
) -> None:
    unknown = {"name": "x", "sha256": "0" * 64}
    partial = random_bytes(64)
    digest = hashlib.sha256(partial).hexdigest()
    files = [{"name": "p.gguf", "bytes": 64, "sha256": digest}]
    made.http("POST", "/models", {"name": "partial", "format": "gguf", "files": files}).ok(201)
    for given in (unknown, {"name": "x", "sha256": digest}):
        answer = made.http("POST", "/workloads", made.job(inputs=[given]))
        assert (answer.status, answer.code, answer.param) == (409, "input_not_verified", "inputs")
        assert answer.json["error"]["digests"] == [given["sha256"]]
    other = projects_of(made, "other")["other"]  # it knows the digest, and that gives it nothing
    given = {"name": "x", "sha256": data["sha256"]}
    assert other("POST", "/workloads", made.job(inputs=[given])).code == "input_not_verified"


def test_what_a_job_reads_is_held_while_it_runs(made: JobInstallation, tmp_path: Path) -> None:
    path = tmp_path / "held.gguf"
    path.write_bytes(random_bytes(32))
    model = made.add_model(path, "held")
    given = [{"name": "x", "sha256": model["files"][0]["sha256"]}]
    job = made.submitted(SLEEP, inputs=given)
    (attempt,) = made.in_state(job, "running")["attempts"]
    refused = made.http("DELETE", f"/models/{model['id']}", evict="true")
    assert (refused.status, refused.code) == (409, "model_referenced")
    assert refused.json["error"]["attempts"] == [attempt["attempt_id"]]
    made.act(job, "cancel").ok(202)
    made.ended(job)
    assert made.http("DELETE", f"/models/{model['id']}", evict="true").ok()["bytes_freed"] == 32
    retried = made.act(job, "retry")
    assert (retried.code, retried.param) == ("input_not_verified", "inputs")
    assert made.record(job)["state"] == "ended"


# Keys.


def test_the_same_key_with_the_same_job_is_the_same_record(made: JobInstallation) -> None:
    document = made.job("print(1)", idempotency_key=f"k {new_id()}")
    first = made.http("POST", "/workloads", document).ok(202)
    again = made.http("POST", "/workloads", {**document, "sensitive": False, "outputs": []}).ok(200)
    assert again["id"] == first["id"]
    made.ended(first["id"])
    assert made.http("POST", "/workloads", document).ok(200)["outcome"] == "succeeded"
    for change in ({"deadline_seconds": 121}, {"sensitive": True}, {"environment": {"A": "b"}}):
        answer = made.http("POST", "/workloads", {**document, **change})
        assert (answer.code, answer.param) == ("idempotency_conflict", "idempotency_key")
        assert answer.json["error"]["workload_id"] == first["id"]
    other = projects_of(made, f"keys {new_id()}")
    (caller,) = other.values()
    assert caller("POST", "/workloads", document).ok(202)["id"] != first["id"]
    made.act(first["id"], "remove").ok()
    fresh = made.http("POST", "/workloads", document).ok(202)
    assert fresh["id"] != first["id"]


def test_without_a_key_each_submission_is_a_job(made: JobInstallation) -> None:
    document = made.job()
    one, two = (made.http("POST", "/workloads", document).ok(202)["id"] for _ in range(2))
    assert one != two
    made.ended(one)
    made.ended(two)


def test_submissions_under_one_key_at_the_same_moment_make_one_job(made: JobInstallation) -> None:
    document = made.job(idempotency_key=new_id())
    barrier = threading.Barrier(8)

    def submit(_: int) -> tuple[int, str]:
        barrier.wait()
        answer = made.http("POST", "/workloads", document)
        return answer.status, answer.json["id"]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(submit, range(8)))
    assert sorted(status for status, _ in answers) == [200] * 7 + [202]
    assert len({workload_id for _, workload_id in answers}) == 1


# What is refused.


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["python3"]}, "argv"),
        ({"argv": ["/bin/true", "a\0b"]}, "argv"),
        ({"argv": "/bin/true"}, "argv"),
        ({"environment": {"A=B": "c"}}, "environment"),
        ({"environment": {"A": 1}}, "environment.A"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"deadline_seconds": None}, "deadline_seconds"),
        ({"deadline_seconds": 30 * 86_400 + 1}, "deadline_seconds"),
        ({"outputs": ["../x"]}, "outputs"),
        ({"outputs": ["/run/ficc/x"]}, "outputs"),
        ({"outputs": ["x", "x"]}, "outputs"),
        ({"outputs": [f"x{n}" for n in range(65)]}, "outputs"),
        ({"inputs": [{"name": "../x", "sha256": "0" * 64}]}, "inputs"),
        ({"inputs": [{"name": "x", "sha256": "A" * 64}]}, "inputs[0].sha256"),
        ({"limits": {"cpu_millis": 100}}, "limits.memory_bytes"),
        ({"runtime": {}}, "runtime.provider"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "a\n"}, "idempotency_key"),
        ({"model_revision": "d" * 64}, "model_revision"),
        ({"endpoint": {}}, "endpoint"),
        ({"sensitive": 1}, "sensitive"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=str,
)
def test_what_is_no_job_is_refused_by_its_place(
    made: JobInstallation, change: dict[str, Any], param: str, data: dict[str, Any]
) -> None:
    if param == "inputs":
        change = {"inputs": [{**change["inputs"][0], "sha256": data["sha256"]}]}
    answer = made.http("POST", "/workloads", {**made.job(), **change})
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", param)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"node_id": "0" * 26}, "node_unknown"),
        ({"limits": {**LIMITS, "memory_bytes": 1 << 50}}, "does_not_fit"),
        ({"limits": {**LIMITS, "gpu_devices": ["GPU-0"]}}, "gpu_missing"),
        ({"runtime": {"image_digest": "sha256:" + "0" * 64}}, "image_not_found"),
        ({"runtime": {"package_digest": "0" * 64}}, "runtime_changed"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_made(made: JobInstallation, change: dict[str, Any], code: str) -> None:
    before = made.http("GET", "/workloads").ok()
    document = made.job()
    for name, value in change.items():
        document[name] = {**document[name], **value} if isinstance(value, dict) else value
    answer = made.http("POST", "/workloads", document)
    assert (answer.status, answer.code) == (409, "does_not_fit")
    assert code in [problem["code"] for problem in answer.json["error"]["problems"]]
    assert made.http("GET", "/workloads").ok() == before


# Sensitive jobs.


def test_what_is_sensitive_comes_back_to_nobody_and_its_output_to_those_who_read_logs(
    made: JobInstallation,
) -> None:
    script = "import os; print(os.environ['KEY']); raise SystemExit(1)"
    secret = f"s{new_id()}"
    job = made.submitted(script, environment={"KEY": secret}, sensitive=True, idempotency_key=new_id())
    record = made.ended(job)
    assert record["plan"]["environment"] == {"KEY": None}
    assert record["sensitive"]
    reader = caller_with(made, "jobs:read", "jobs:cancel", "inference:read", "contributors:read")
    shown = [
        reader("GET", f"/workloads/{job}").body,
        reader("GET", "/workloads").body,
        json.dumps(record).encode(),
    ]
    assert not [body for body in shown if secret.encode() in body]
    for name in ("controller", "executor"):
        assert secret not in made.logs[name].read_text()
    refused = reader("POST", f"/workloads/{job}/output", {"stream": "log"})
    assert (refused.code, refused.param) == ("denied", "jobs:logs")
    assert made.log(job).strip() == secret


def test_what_is_not_sensitive_is_shown(made: JobInstallation) -> None:
    job = made.submitted("print('x'); raise SystemExit(1)", environment={"A": "b"})
    record = made.ended(job)
    assert record["plan"]["environment"] == {"A": "b"}
    assert "x" in record["reason"]["message"].splitlines()


# Lists, projects, scopes.


def test_lists_are_newest_first_in_pages_and_without_plans(made: JobInstallation) -> None:
    jobs = [made.submitted() for _ in range(3)]
    page = made.http("GET", "/workloads", limit="2").ok()
    assert [one["id"] for one in page["items"]] == jobs[:0:-1]
    assert "plan" not in page["items"][0]
    rest = made.http("GET", "/workloads", limit="1", after=page["next"]).ok()
    assert [one["id"] for one in rest["items"]] == jobs[:1]
    for job in jobs:
        made.ended(job)


def test_another_projects_job_is_not_found(made: JobInstallation) -> None:
    job = made.submitted(SLEEP)
    made.in_state(job, "running")
    (stranger,) = projects_of(made, f"stranger {new_id()}").values()
    revision = {"revision": made.record(job)["revision"]}
    asked = [
        stranger("GET", f"/workloads/{job}"),
        stranger("POST", f"/workloads/{job}/output", {"stream": "log"}),
        *(
            stranger("POST", f"/workloads/{job}/{action}", revision)
            for action in ("cancel", "retry", "remove")
        ),
        stranger("POST", f"/workloads/{job}/release", {**revision, "acknowledge_unknown": True}),
    ]
    assert {answer.code for answer in asked} == {"not_found"}
    assert stranger("GET", "/workloads").ok()["items"] == []
    assert made.record(job)["state"] == "running"
    made.act(job, "cancel").ok(202)
    made.ended(job)


EXECUTE = ("jobs:execute", "contributors:read")
ROUTES = [
    ("GET", "/workloads", None, ("jobs:read",)),
    ("GET", "/workloads/{id}", None, ("jobs:read",)),
    ("POST", "/workloads", "job", EXECUTE),
    ("POST", "/workloads", "job with inputs", (*EXECUTE, "models:read")),
    ("POST", "/workloads/{id}/cancel", {"revision": 0}, ("jobs:cancel",)),
    ("POST", "/workloads/{id}/retry", {"revision": 0}, EXECUTE),
    ("POST", "/workloads/{id}/release", {"revision": 0, "acknowledge_unknown": True}, ("jobs:cancel",)),
    ("POST", "/workloads/{id}/remove", {"revision": 0}, ("jobs:cancel",)),
    ("POST", "/workloads/{id}/output", {"stream": "log"}, ("jobs:logs",)),
    ("GET", "/audit", None, ("audit:read",)),
]


@pytest.mark.parametrize(("method", "path", "body", "scopes"), ROUTES, ids=str)
def test_each_route_takes_its_scopes(
    made: JobInstallation, data: dict[str, Any], method: str, path: str, body: Any, scopes: tuple[str, ...]
) -> None:
    given = [{"name": "x", "sha256": data["sha256"]}]
    if isinstance(body, str):
        body = made.job(inputs=given if "inputs" in body else [])
    target = path.format(id=new_id())
    allowed = caller_with(made, *scopes)(method, target, body)
    assert allowed.status in (200, 202) or allowed.code == "not_found"
    for scope in scopes:
        answer = caller_with(made, *(set(SCOPES) - {scope}))(method, target, body)
        assert (answer.code, answer.param) == ("denied", scope)
