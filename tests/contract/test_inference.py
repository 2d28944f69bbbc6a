"""Services: preview, submission, replacement, control and their tokens, with a scripted engine in a real sandbox."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation
from ficc.inference.schema import Specification
from support.http import Http, database_url_of
from support.rows import everything

pytestmark = pytest.mark.timeout(240)

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def make(scripted: ScriptedInstallation) -> Iterator[Make]:
    """Makes ready services; they are removed afterwards."""
    made: list[str] = []

    def ready(alias: str, replicas: int = 1, **changes: Any) -> dict[str, Any]:
        service = scripted.service(alias, replicas, **changes)
        made.append(service["id"])
        return service

    yield ready
    for service_id in made:
        if scripted.http("GET", f"/inference/{service_id}").status == 200:
            scripted.remove(service_id)


@pytest.fixture(scope="module")
def resting(scripted: ScriptedInstallation) -> Iterator[str]:
    """A stopped service that no test changes."""
    service_id = scripted.service("resting")["id"]
    scripted.stopped(service_id)
    yield service_id
    scripted.remove(service_id)


def without(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {member: value for member, value in document.items() if member != name}


def too_large(scripted: ScriptedInstallation, spec: dict[str, Any]) -> Any:
    """A placement that takes more memory than the node has."""
    placement = copy.deepcopy(spec["placements"][0])
    placement["limits"]["memory_bytes"] = scripted.node()["capacity"]["memory_bytes"] + 1
    return placement


# Reading.


@pytest.mark.contract("C-S1", "C-R3")
def test_a_service_shows_what_was_asked_and_what_carries_it(
    scripted: ScriptedInstallation, make: Make
) -> None:
    spec = scripted.spec("shown", replicas=2)
    service_id = make("shown", replicas=2)["id"]
    found = scripted.record(service_id)
    assert {name: found["spec"][name] for name in without(spec, "placements")} == without(spec, "placements")
    asked = [placement["node_id"] for placement in spec["placements"]]
    assert [placement["node_id"] for placement in found["spec"]["placements"]] == asked
    assert (found["generation"], found["state"], found["alias"]) == (1, "ready", "shown")
    model = scripted.http("GET", f"/models/{spec['model_id']}").ok()
    assert len({replica["workload_id"] for replica in found["replicas"]}) == 2
    for replica in found["replicas"]:
        assert (replica["state"], replica["generation"], replica["outcome"]) == ("ready", 1, None)
        assert replica["model_revision"] == model["revision"]
        assert replica["node_id"] == asked[0]
    assert found in scripted.http("GET", "/inference").ok()["items"]
    assert model["references"] == [service_id]


@pytest.mark.contract("C-M12")
def test_a_model_of_a_service_is_not_removed(scripted: ScriptedInstallation, resting: str) -> None:
    model_id = scripted.record(resting)["spec"]["model_id"]
    answer = scripted.http("DELETE", f"/models/{model_id}")
    assert (answer.status, answer.code) == (409, "model_referenced")
    assert resting in answer.json["error"]["services"]
    assert scripted.http("GET", f"/models/{model_id}").ok()["state"] == "ready"


@pytest.mark.contract("C-M12", "C-M13")
def test_a_model_of_a_service_is_not_evicted(scripted: ScriptedInstallation, resting: str) -> None:
    model_id = scripted.record(resting)["spec"]["model_id"]
    answer = scripted.http("DELETE", f"/models/{model_id}", evict="true")
    assert (answer.status, answer.code) == (409, "model_referenced")
    assert scripted.http("GET", f"/models/{model_id}").ok()["state"] == "ready"


# Previewing and submitting.


@pytest.mark.contract("C-S2")
def test_a_preview_shows_what_every_replica_would_reserve(scripted: ScriptedInstallation) -> None:
    spec = scripted.spec("previewed", replicas=2)
    spec["placements"][1]["limits"]["cpu_millis"] = 300
    preview = scripted.http("POST", "/inference/preview", spec).ok()
    assert preview["accepted"] is True
    for placement, replica in zip(spec["placements"], preview["replicas"], strict=True):
        shown = {name: replica["reservation"][name] for name in placement["limits"]}
        assert shown == placement["limits"]
        assert (replica["node_id"], replica["fits"]) == (placement["node_id"], True)
        assert replica["available"]["memory_bytes"] > placement["limits"]["memory_bytes"]


@pytest.mark.contract("C-S2")
def test_a_preview_validates_the_placement(scripted: ScriptedInstallation) -> None:
    spec = scripted.spec("previewed", replicas=2)
    spec["placements"].append(too_large(scripted, spec))
    spec["placements"].append({**spec["placements"][0], "node_id": "0" * 26})
    preview = scripted.http("POST", "/inference/preview", spec).ok()
    assert preview["accepted"] is False
    assert [replica["fits"] for replica in preview["replicas"]] == [True, True, False, False]
    codes = [[problem["code"] for problem in replica["problems"]] for replica in preview["replicas"]]
    assert codes == [[], [], ["does_not_fit"], ["node_unknown"]]


@pytest.mark.contract("C-S2")
def test_a_preview_writes_nothing(scripted: ScriptedInstallation) -> None:
    spec = scripted.spec("previewed")
    before = everything(database_url_of(scripted))
    assert scripted.http("POST", "/inference/preview", spec).ok()["accepted"]
    assert everything(database_url_of(scripted)) == before


@pytest.mark.contract("C-S3")
def test_every_replica_is_submitted(scripted: ScriptedInstallation, make: Make) -> None:
    service = make("three", replicas=3)
    assert len({replica["attempt_id"] for replica in service["replicas"]}) == 3
    reserved = scripted.node()["reserved"]["cpu_millis"]
    assert reserved == sum(p["limits"]["cpu_millis"] for p in service["spec"]["placements"])


@pytest.mark.contract("C-S3")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_if_one_replica_does_not_fit_nothing_is_submitted(scripted: ScriptedInstallation, place: int) -> None:
    spec = scripted.spec("none", replicas=2)
    spec["placements"].insert(place, too_large(scripted, spec))
    before = everything(database_url_of(scripted))
    answer = scripted.http("POST", "/inference", spec)
    assert (answer.status, answer.code) == (409, "does_not_fit")
    assert everything(database_url_of(scripted)) == before
    assert scripted.node()["reserved"]["memory_bytes"] == 0


# Replacing.


@pytest.mark.contract("C-S4")
def test_put_replaces_a_stopped_service_and_starts_its_next_generation(
    scripted: ScriptedInstallation, make: Make
) -> None:
    service = make("replaced")
    stopped = scripted.stopped(service["id"])
    spec = scripted.spec("renamed", replicas=2, context=256)
    body = {"revision": stopped["revision"], "spec": spec}
    replaced = scripted.http("PUT", f"/inference/{service['id']}", body).ok(202)
    assert replaced["generation"] == service["generation"] + 1
    assert (replaced["spec"]["context"], replaced["alias"]) == (256, "renamed")
    ready = scripted.settled(service["id"], "ready", "failed")
    assert [replica["generation"] for replica in ready["replicas"]] == [replaced["generation"]] * 2
    assert not {r["attempt_id"] for r in ready["replicas"]} & {r["attempt_id"] for r in service["replicas"]}
    assert scripted.report(service["id"])["call"]["specification"]["context"] == 256


@pytest.mark.contract("C-S4")
def test_put_replaces_nothing_that_runs(scripted: ScriptedInstallation, make: Make) -> None:
    service = make("running")
    body = {"revision": service["revision"], "spec": scripted.spec("running", context=256)}
    answer = scripted.http("PUT", f"/inference/{service['id']}", body)
    assert (answer.status, answer.code) == (409, "service_not_stopped")
    assert scripted.record(service["id"]) == service


@pytest.mark.contract("C-S4")
def test_put_leaves_a_service_as_it_was_if_the_new_one_does_not_fit(
    scripted: ScriptedInstallation, resting: str
) -> None:
    spec = scripted.spec("resting")
    spec["placements"].append(too_large(scripted, spec))
    before = scripted.record(resting)
    answer = scripted.http("PUT", f"/inference/{resting}", {"revision": before["revision"], "spec": spec})
    assert (answer.status, answer.code) == (409, "does_not_fit")
    assert scripted.record(resting) == before


# Controlling.


def test_a_stopped_service_says_so_and_not_that_it_will_be_ready(
    scripted: ScriptedInstallation, resting: str
) -> None:
    answer = scripted.chat(resting)
    assert (answer.status, answer.code) == (503, "service_stopped")
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.contract("C-S5")
def test_a_service_is_stopped_started_drained_and_removed(scripted: ScriptedInstallation, make: Make) -> None:
    service_id = make("controlled")["id"]
    assert scripted.control(service_id, "stop").ok(202)["desired"] == "stopped"
    stopped = scripted.stopped(service_id)
    assert (stopped["state"], stopped["generation"]) == ("stopped", 1)

    started = scripted.control(service_id, "start").ok(202)
    assert (started["generation"], started["desired"]) == (2, "running")
    scripted.settled(service_id, "ready")

    assert scripted.control(service_id, "drain").ok(202)["state"] == "draining"
    scripted.stopped(service_id)

    assert scripted.control(service_id, "remove").ok(202) == {"removed": True}
    assert scripted.http("GET", f"/inference/{service_id}").code == "not_found"


@pytest.mark.contract("C-S5")
def test_there_is_no_other_action(scripted: ScriptedInstallation, resting: str) -> None:
    for action in ("pause", "restart", "delete", "START"):
        answer = scripted.control(resting, action)
        assert (answer.status, answer.code) == (404, "not_found")


@pytest.mark.contract("C-S5")
@pytest.mark.parametrize("body", [{}, {"revision": "1"}, {"revision": 1, "force": True}, {"revision": None}])
def test_control_takes_a_revision_and_an_acknowledgement_and_nothing_else(
    scripted: ScriptedInstallation, resting: str, body: Any
) -> None:
    answer = scripted.http("POST", f"/inference/{resting}/control/start", body)
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert scripted.record(resting)["state"] == "stopped"


@pytest.mark.contract("C-S13")
@pytest.mark.parametrize("action", ["start", "drain", "stop", "remove", "PUT"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_revision_that_is_not_the_services_own_changes_nothing(
    scripted: ScriptedInstallation, resting: str, action: str, off: int
) -> None:
    before = scripted.record(resting)
    body: dict[str, Any] = {"revision": before["revision"] + off}
    if action == "PUT":
        answer = scripted.http("PUT", f"/inference/{resting}", {**body, "spec": before["spec"]})
    else:
        answer = scripted.http("POST", f"/inference/{resting}/control/{action}", body)
    assert (answer.status, answer.code) == (409, "revision_conflict")
    assert scripted.record(resting) == before


@pytest.mark.contract("C-S13")
def test_a_fresh_revision_is_taken(scripted: ScriptedInstallation, make: Make) -> None:
    """Its state changed since it was made, so the revision that making it answered with is stale by now."""
    ready = make("fresh")
    stale = {"revision": 1}
    assert ready["revision"] > 1
    assert scripted.http("POST", f"/inference/{ready['id']}/control/stop", stale).code == "revision_conflict"
    fresh = {"revision": ready["revision"]}
    assert scripted.http("POST", f"/inference/{ready['id']}/control/stop", fresh).status == 202


# Tokens.


@pytest.mark.contract("C-S6")
def test_a_service_token_invokes_its_service_and_nothing_else(
    scripted: ScriptedInstallation, make: Make
) -> None:
    mine, other = make("mine"), make("other")
    before = time.time()
    made = scripted.http("POST", f"/inference/{mine['id']}/tokens", {"lifetime": 3600}).ok(201)
    caller = Http(scripted.origin, made["token"])

    assert caller("GET", f"/inference/{mine['id']}/v1/models").status == 200
    assert scripted.chat(mine["id"], caller, messages=[{}]).status == 200
    for answer in (
        caller("GET", f"/inference/{other['id']}/v1/models"),
        scripted.chat(other["id"], caller, messages=[{}]),
        caller("GET", f"/inference/{mine['id']}"),
        caller("GET", "/inference"),
        caller("GET", "/models"),
        caller("POST", f"/inference/{mine['id']}/tokens", {"lifetime": 3600}),
        caller("POST", f"/inference/{mine['id']}/control/stop", {"revision": mine["revision"]}),
    ):
        assert (answer.status, answer.code) == (403, "denied")

    (listed,) = [t for t in scripted.http("GET", "/tokens").ok()["items"] if t["id"] == made["id"]]
    assert (listed["scopes"], listed["service_id"]) == (["inference:invoke"], mine["id"])
    assert listed["expires_at"] == made["expires_at"]
    assert time.strftime("%Y-%m-%dT%H:%M", time.gmtime(before + 3600)) <= made["expires_at"]
    assert made["expires_at"] <= time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3601))


@pytest.mark.contract("C-S6")
@pytest.mark.parametrize("body", [{}, {"lifetime": 0}, {"lifetime": "60"}, {"lifetime": 60, "scopes": []}])
def test_a_service_token_has_a_lifetime_and_nothing_else(
    scripted: ScriptedInstallation, resting: str, body: Any
) -> None:
    answer = scripted.http("POST", f"/inference/{resting}/tokens", body)
    assert (answer.status, answer.code) == (422, "invalid_request")


# The specification.


REQUIRED = ("alias", "model_id", "engine", "runtime", "context", "placements")
OPTIONAL = ("gpu_layers", "tensor_split", "parallelism", "deadline_seconds")
FIELDS = {*REQUIRED, "executable", "concurrency", *OPTIONAL}
OURS = {"restart"}
"""A field beyond the contract's, which whoever knows the contract alone leaves out."""


@pytest.mark.contract("C-S11")
def test_a_specification_has_these_fields_and_no_others(scripted: ScriptedInstallation) -> None:
    assert set(Specification.model_fields) == FIELDS | OURS
    spec = scripted.spec("fields")
    answer = scripted.http("POST", "/inference/preview", {**spec, "replicas": 2})
    assert (answer.status, answer.code, answer.param) == (422, "invalid_request", "replicas")
    for name in REQUIRED:
        answer = scripted.http("POST", "/inference/preview", without(spec, name))
        assert (answer.status, answer.code, answer.param) == (422, "invalid_request", name)
    assert not OURS & set(spec)
    assert scripted.http("POST", "/inference/preview", spec).status == 200


@pytest.mark.contract("C-S11")
def test_a_placement_is_a_node_and_its_limits(scripted: ScriptedInstallation) -> None:
    spec = scripted.spec("placements")
    placement = spec["placements"][0]
    for bad, param in (
        (without(placement, "node_id"), "placements[0].node_id"),
        (without(placement, "limits"), "placements[0].limits"),
        ({**placement, "count": 2}, "placements[0].count"),
        (
            {**placement, "limits": without(placement["limits"], "memory_bytes")},
            "placements[0].limits.memory_bytes",
        ),
    ):
        answer = scripted.http("POST", "/inference/preview", {**spec, "placements": [bad]})
        assert (answer.status, answer.code, answer.param) == (422, "invalid_request", param)
    answer = scripted.http("POST", "/inference/preview", {**spec, "placements": []})
    assert (answer.status, answer.param) == (422, "placements")


@pytest.mark.contract("C-S12")
def test_what_is_optional_can_be_left_out(scripted: ScriptedInstallation) -> None:
    spec = scripted.spec("optional")
    bare = {name: value for name, value in spec.items() if name not in OPTIONAL}
    assert scripted.http("POST", "/inference/preview", bare).ok()["accepted"]


@pytest.mark.contract("C-S12")
def test_what_is_optional_reaches_the_engines_adapter(scripted: ScriptedInstallation, make: Make) -> None:
    given = {
        "gpu_layers": 7,
        "tensor_split": [3, 1],
        "parallelism": {"tensor": 2, "pipeline": 1},
        "deadline_seconds": 30,
    }
    service = make("given", **given)
    told = scripted.report(service["id"])["call"]["specification"]
    assert {name: told[name] for name in OPTIONAL} == given


@pytest.mark.contract("C-S12")
def test_a_request_ends_at_its_deadline(scripted: ScriptedInstallation, make: Make) -> None:
    service_id = make("late", deadline_seconds=1)["id"]
    answer = scripted.chat(service_id, do="hang", key="late")
    assert (answer.status, answer.code) == (504, "deadline_exceeded"), answer.body
    scripted.until(lambda: scripted.seen(service_id, "late")["closed"], "the engine's connection is closed")


@pytest.mark.contract("C-S12")
def test_a_service_whose_engine_outgrows_its_limit_fails_and_says_so(
    scripted: ScriptedInstallation, make: Make
) -> None:
    """The limit is the sandbox's: the machine and its neighbours have their memory all the time."""
    service_id = make("hoarder", restart="never")["id"]
    answer = scripted.chat(service_id, do="hoard", key="hoard")
    assert (answer.status, answer.code) == (502, "engine_error")
    failed = scripted.settled(service_id, "failed")
    assert failed["reason"]["code"] == "out_of_memory"
    assert "160 MiB" in failed["reason"]["message"] or "167.8 MB" in failed["reason"]["message"]
