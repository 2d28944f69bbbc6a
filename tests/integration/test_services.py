"""Services over the API, with the real engine: every replica or none, control, generations, failures."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import pytest

from ficc.client.errors import ApiError
from support.installation import Installation

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def model(installation: Installation, model_file: Path) -> dict[str, Any]:
    return installation.add_model(model_file, "smollm2")


def refused(installation: Installation, method: str, path: str, body: Any = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        installation.call(method, path, body)
    return caught.value


def control(installation: Installation, service: dict[str, Any], action: str, **more: Any) -> Any:
    fresh = installation.call("GET", f"/inference/{service['id']}")
    body = {"revision": fresh["revision"], **more}
    return installation.call("POST", f"/inference/{service['id']}/control/{action}", body)


def reserved(installation: Installation) -> dict[str, Any]:
    found: dict[str, Any] = installation.node()["reserved"]
    return found


def remove(installation: Installation, service: dict[str, Any]) -> None:
    state = installation.call("GET", f"/inference/{service['id']}")["state"]
    if state not in ("stopped", "failed"):
        control(installation, service, "stop")
        installation.settled(service["id"], "stopped", "failed")
    installation.until(
        lambda: all(
            r["released"] for r in installation.call("GET", f"/inference/{service['id']}")["replicas"]
        ),
        "every attempt is released",
    )
    control(installation, service, "remove")


def test_the_life_of_a_service(installation: Installation, model: dict[str, Any]) -> None:
    spec = installation.specification("life", model["id"])
    made = installation.call("POST", "/inference", spec)
    assert (made["state"], made["desired"], made["generation"]) == ("starting", "running", 1)
    ready = installation.settled(made["id"], "ready")
    assert ready["replicas"][0]["state"] == "ready"
    assert ready["replicas"][0]["ready_at"]
    assert ready["endpoint"] == f"/api/v1/inference/{made['id']}/v1"
    assert reserved(installation)["memory_bytes"] == spec["placements"][0]["limits"]["memory_bytes"]

    # Nothing but stop and drain while it runs.
    error = refused(
        installation, "POST", f"/inference/{made['id']}/control/start", {"revision": ready["revision"]}
    )
    assert (error.status, error.code) == (409, "service_not_stopped")
    error = refused(
        installation, "PUT", f"/inference/{made['id']}", {"revision": ready["revision"], "spec": spec}
    )
    assert (error.status, error.code) == (409, "service_not_stopped")
    error = refused(
        installation, "POST", f"/inference/{made['id']}/control/remove", {"revision": ready["revision"]}
    )
    assert (error.status, error.code) == (409, "service_not_stopped")
    error = refused(installation, "DELETE", f"/models/{model['id']}")
    assert (error.status, error.code) == (409, "model_referenced")
    assert error.error["services"] == [made["id"]]

    # A stale revision is refused and changes nothing.
    error = refused(installation, "POST", f"/inference/{made['id']}/control/stop", {"revision": 0})
    assert (error.status, error.code) == (409, "revision_conflict")
    assert installation.call("GET", f"/inference/{made['id']}")["state"] == "ready"

    stopping = control(installation, made, "stop")
    assert (stopping["state"], stopping["desired"]) == ("stopping", "stopped")
    stopped = installation.settled(made["id"], "stopped")
    assert stopped["replicas"][0]["outcome"] == "cancelled"
    installation.until(lambda: not reserved(installation)["memory_bytes"], "the reservation is back")

    # The next generation has the same plan and a new attempt.
    restarted = control(installation, made, "start")
    assert restarted["generation"] == 2
    again = installation.settled(made["id"], "ready")
    assert again["replicas"][0]["plan_digest"] == ready["replicas"][0]["plan_digest"]
    assert again["replicas"][0]["attempt_id"] != ready["replicas"][0]["attempt_id"]

    drained = control(installation, made, "drain")
    assert (drained["state"], drained["desired"]) == ("draining", "stopped")
    installation.settled(made["id"], "stopped")

    # A replacement is another generation under another specification.
    other = {**spec, "context": 256}
    revision = installation.call("GET", f"/inference/{made['id']}")["revision"]
    replaced = installation.call("PUT", f"/inference/{made['id']}", {"revision": revision, "spec": other})
    assert (replaced["generation"], replaced["spec"]["context"]) == (3, 256)
    third = installation.settled(made["id"], "ready")
    assert third["replicas"][0]["plan_digest"] != ready["replicas"][0]["plan_digest"]
    remove(installation, made)
    error = refused(installation, "GET", f"/inference/{made['id']}")
    assert (error.status, error.code) == (404, "not_found")


def test_l6_every_replica_or_none(installation: Installation, model: dict[str, Any]) -> None:
    spec = installation.specification("three", model["id"])
    small = spec["placements"][0]
    large = copy.deepcopy(small)
    large["limits"]["memory_bytes"] = installation.node()["capacity"]["memory_bytes"]
    spec["placements"] = [small, large, small]
    before = installation.call("GET", "/inference")["items"]
    preview = installation.call("POST", "/inference/preview", spec)
    assert not preview["accepted"]
    assert [replica["fits"] for replica in preview["replicas"]] == [True, False, True]
    assert preview["replicas"][1]["problems"][0]["code"] == "does_not_fit"
    error = refused(installation, "POST", "/inference", spec)
    assert (error.status, error.code) == (409, "does_not_fit")
    assert error.beside["preview"]["replicas"][1]["fits"] is False
    assert installation.call("GET", "/inference")["items"] == before
    assert not reserved(installation)["memory_bytes"]


def test_two_replicas_share_a_node_and_a_project_url(
    installation: Installation, model: dict[str, Any]
) -> None:
    spec = installation.specification("pair", model["id"])
    spec["placements"] *= 2
    made = installation.call("POST", "/inference", spec)
    ready = installation.settled(made["id"], "ready")
    assert len({replica["attempt_id"] for replica in ready["replicas"]}) == 2
    assert reserved(installation)["cpu_millis"] == 2 * spec["placements"][0]["limits"]["cpu_millis"]
    remove(installation, made)


def test_a_preview_writes_nothing_and_its_digest_is_stable(
    installation: Installation, model: dict[str, Any]
) -> None:
    spec = installation.specification("seen", model["id"])
    one = installation.call("POST", "/inference/preview", spec)
    two = installation.call("POST", "/inference/preview", spec)
    assert one["preview_digest"] == two["preview_digest"]
    assert one["replicas"][0]["estimate"]["weights_bytes"] == model["bytes_total"]
    changed = {**spec, "context": 128, "preview_digest": one["preview_digest"]}
    error = refused(installation, "POST", "/inference", changed)
    assert (error.status, error.code) == (409, "preview_changed")
    assert error.beside["preview"]["preview_digest"] != one["preview_digest"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"alias": "Upper"}, "alias"),
        ({"alias": ""}, "alias"),
        ({"alias": "a" * 64}, "alias"),
        ({"context": 0}, "context"),
        ({"context": "512"}, "context"),
        ({"concurrency": 0}, "concurrency"),
        ({"placements": []}, "placements"),
        ({"engine": "vllm_from_mars"}, "engine"),
        ({"gpu_layers": 8}, "gpu_layers"),
        ({"gpu_layers": "some"}, "gpu_layers"),
        ({"tensor_split": [1, 1]}, "tensor_split"),
        ({"parallelism": {"tensor": 2, "pipeline": 1}}, "parallelism"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_bad_specifications(
    installation: Installation, model: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    spec = {**installation.specification("bad", model["id"]), **change}
    for path in ("/inference/preview", "/inference"):
        error = refused(installation, "POST", path, spec)
        assert (error.status, error.code) == (422, "invalid_request")
        assert str(error.error["param"]).startswith(param)


def test_limits_of_a_specification_at_and_past(installation: Installation, model: dict[str, Any]) -> None:
    spec = installation.specification("a" * 63, model["id"])
    spec["placements"] = spec["placements"] * 64
    assert installation.call("POST", "/inference/preview", spec)["replicas"][63]
    spec["placements"] = spec["placements"] * 2
    assert refused(installation, "POST", "/inference/preview", spec).code == "invalid_request"


def test_a_placement_elsewhere_or_on_an_unknown_runtime(
    installation: Installation, model: dict[str, Any]
) -> None:
    spec = installation.specification("nowhere", model["id"])
    elsewhere = copy.deepcopy(spec)
    elsewhere["placements"][0]["node_id"] = "0" * 26
    preview = installation.call("POST", "/inference/preview", elsewhere)
    assert preview["replicas"][0]["problems"][0]["code"] == "node_unknown"
    unknown = copy.deepcopy(spec)
    unknown["runtime"]["image_digest"] = "sha256:" + "0" * 64
    preview = installation.call("POST", "/inference/preview", unknown)
    assert preview["replicas"][0]["problems"][0]["code"] == "image_not_found"
    changed = copy.deepcopy(spec)
    changed["runtime"]["package_digest"] = "0" * 64
    preview = installation.call("POST", "/inference/preview", changed)
    assert preview["replicas"][0]["problems"][0]["code"] == "runtime_changed"
    gpu = copy.deepcopy(spec)
    gpu["placements"][0]["limits"]["gpu_devices"] = ["GPU-0"]
    preview = installation.call("POST", "/inference/preview", gpu)
    assert "gpu_missing" in [problem["code"] for problem in preview["replicas"][0]["problems"]]  # L11


def test_a25_a_model_that_is_not_verified_is_not_placed(installation: Installation) -> None:
    manifest = {
        "name": "empty",
        "format": "gguf",
        "files": [{"name": "m.gguf", "bytes": 5, "sha256": "0" * 64}],
    }
    model = installation.call("POST", "/models", manifest)
    spec = installation.specification("unverified", model["id"])
    for path in ("/inference/preview", "/inference"):
        error = refused(installation, "POST", path, spec)
        assert (error.status, error.code, error.error["param"]) == (409, "model_not_ready", "model_id")


def test_an_alias_is_unique_in_its_project(installation: Installation, model: dict[str, Any]) -> None:
    spec = installation.specification("unique", model["id"])
    made = installation.call("POST", "/inference", spec)
    error = refused(installation, "POST", "/inference", spec)
    assert (error.status, error.code) == (409, "alias_taken")
    remove(installation, made)


def test_acknowledge_unknown_belongs_to_start(installation: Installation, model: dict[str, Any]) -> None:
    made = installation.call("POST", "/inference", installation.specification("ack", model["id"]))
    body = {"revision": made["revision"], "acknowledge_unknown": True}
    for action in ("stop", "drain", "remove"):
        error = refused(installation, "POST", f"/inference/{made['id']}/control/{action}", body)
        assert (error.status, error.error["param"]) == (422, "acknowledge_unknown")
    error = refused(
        installation, "POST", f"/inference/{made['id']}/control/pause", {"revision": made["revision"]}
    )
    assert (error.status, error.error["param"]) == (404, "action")
    remove(installation, made)


def test_l10_an_engine_that_cannot_load_its_model(
    installation: Installation, model_file: Path, tmp_path: Path
) -> None:
    """A truncated GGUF, registered with its own true hash: verified bytes, but no model."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model_file.read_bytes()[: 4 << 20])
    model = installation.add_model(broken, "broken")
    assert model["state"] == "ready"
    policy = {"on_failure": {"delay_seconds": 1, "factor": 1, "failures_max": 2}}
    spec = installation.specification("broken", model["id"], restart=policy)
    made = installation.call("POST", "/inference", spec)
    failed = installation.settled(made["id"], "failed", "ready")
    assert failed["state"] == "failed"
    assert failed["desired"] == "running"
    assert failed["reason"]["code"] == "engine_exited"
    assert "tensor" in failed["reason"]["message"]  # the engine's own words
    replica = failed["replicas"][0]
    assert replica["outcome"] == "failed"
    assert replica["error"] == failed["reason"]
    installation.until(lambda: not reserved(installation)["memory_bytes"], "the reservation is back")
    log = installation.call("GET", f"/inference/{made['id']}/logs")
    assert "tensor" in log["text"]
    time.sleep(2)  # no storm of attempts
    assert installation.call("GET", f"/inference/{made['id']}")["replicas"][0]["attempt"] == 2
    remove(installation, made)


def test_a_context_whose_cache_does_not_fit_is_refused_before_anything_starts(
    installation: Installation, model: dict[str, Any]
) -> None:
    """The files alone would fit; what the header says of the cache does not."""
    spec = installation.specification("tight", model["id"], context=4096, concurrency=8)
    spec["placements"][0]["limits"]["memory_bytes"] = 180 << 20
    preview = installation.call("POST", "/inference/preview", spec)
    (replica,) = preview["replicas"]
    assert replica["estimate"]["basis"] == "metadata"
    assert replica["estimate"]["kv_cache_bytes"] > 180 << 20
    assert [problem["code"] for problem in replica["problems"]] == ["memory_limit_too_small"]
    with pytest.raises(ApiError) as caught:
        installation.call("POST", "/inference", spec)
    assert caught.value.code == "does_not_fit"


def test_a_context_beyond_what_the_model_was_made_for_is_a_warning(
    installation: Installation, model: dict[str, Any]
) -> None:
    spec = installation.specification("long", model["id"], context=8193, concurrency=1)
    preview = installation.call("POST", "/inference/preview", spec)
    assert "context_beyond_training" in [warning["code"] for warning in preview["warnings"]]


def test_a_service_token_dies_with_its_service(installation: Installation, model: dict[str, Any]) -> None:
    made = installation.call("POST", "/inference", installation.specification("mortal", model["id"]))
    token = installation.call("POST", f"/inference/{made['id']}/tokens", {"lifetime": 60})["token"]

    async def models() -> Any:
        async with installation.api(token) as api:
            return await api.call("GET", f"/inference/{made['id']}/v1/models")

    assert asyncio.run(models())["data"][0]["id"] == "mortal"
    remove(installation, made)
    with pytest.raises(ApiError) as caught:
        asyncio.run(models())
    assert caught.value.code == "unauthenticated"
