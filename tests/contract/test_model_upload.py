"""An engine that takes its model over its own API: a service of it is ready once the executor handed it the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import LIMITS
from support.executor import CACHE, PYTHON, python_image
from support.http import Http, http_of
from support.installation import Installation

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

ENGINE = Path(__file__).parents[1] / "support" / "native_engine.py"
ADAPTER = '''\
from ficc.domain.plan import Endpoint
from ficc.inference.contract import Job, Probe

ROUTE = "/v1/chat/completions"


class Native:
    """The model's file is the engine's own script, and is uploaded to it as well."""

    API_VERSION = 1

    def job(self, specification, model_record, placement, references):
        return Job(
            argv=(specification.executable, "-IB", f"/inputs/{model_record.manifest.entry.name}", "11434",
                  specification.alias.partition("-")[0]),
            environment={},
            limits=placement.limits.to_domain(),
            inputs=tuple(references),
            endpoint=Endpoint("tcp", 11434, (("POST", ROUTE), ("POST", "/seen")), 1 << 20, 2,
                              tuple(reference.id for reference in references)),
            readiness=Probe(ROUTE, {"model": specification.alias}),
            model_revision=model_record.revision,
            upload_as=specification.alias,
        )
'''


def install_adapter(directory: Path) -> Path:
    metadata = directory / "native_adapter-1.0.dist-info"
    metadata.mkdir(parents=True)
    (directory / "native_adapter.py").write_text(ADAPTER)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: native-adapter\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ficc.inference]\nnative = native_adapter:Native\n")
    for path in (directory, metadata, *directory.glob("*.py"), *metadata.iterdir()):
        path.chmod(0o755)  # the controller has an account of its own
    return directory


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("native")
    python_image()
    path = [str(install_adapter(directory / "adapter")), *filter(None, [os.environ.get("PYTHONPATH")])]
    with Installation(
        directory, images=CACHE / "store", settings={"PYTHONPATH": os.pathsep.join(path)}
    ) as made:
        file = directory / "model.gguf"
        file.write_bytes(ENGINE.read_bytes())
        made.add_model(file, "native", ["chat"])
        yield made


@pytest.fixture
def http(installation: Installation) -> Http:
    return http_of(installation)


def service(installation: Installation, http: Http, alias: str, *states: str) -> dict[str, Any]:
    """Made, and in one of these states."""
    (model,) = http("GET", "/models").ok()["items"]
    spec = {
        "alias": alias,
        "model_id": model["id"],
        "engine": "native",
        "runtime": installation.runtime("tests/python"),
        "executable": PYTHON,
        "context": 512,
        "concurrency": 2,
        "placements": [{"node_id": installation.node()["id"], "limits": LIMITS}],
    }
    made = http("POST", "/inference", spec).ok(202)
    return installation.settled(made["id"], *states)


def stop_and_remove(installation: Installation, http: Http, found: dict[str, Any]) -> None:
    url = f"/inference/{found['id']}"
    if found["state"] == "ready":
        http("POST", f"{url}/control/stop", {"revision": found["revision"]}).ok(202)
    at_rest = installation.until(lambda: _released(http, url), "it is at rest")
    http("POST", f"{url}/control/remove", {"revision": at_rest["revision"]}).ok(202)


def _released(http: Http, url: str) -> dict[str, Any]:
    record: dict[str, Any] = http("GET", url).ok()
    return record if all(one["released"] for one in record["replicas"]) else {}


@pytest.mark.contract("C-X6")
def test_a_service_is_ready_once_its_engine_has_the_model(installation: Installation, http: Http) -> None:
    """The engine knows no model until the executor uploads the admitted input and creates it."""
    found = service(installation, http, "serve-it", "ready", "failed")
    assert found["state"] == "ready", found["reason"]
    chat = {"model": "serve-it", "messages": [{"role": "user", "content": "Hi"}]}
    answer = http("POST", f"/inference/{found['id']}/v1/chat/completions", chat)
    assert answer.status == 200, answer.json
    assert answer.json["choices"][0]["message"]["content"] == "hello"
    stop_and_remove(installation, http, found)


@pytest.mark.contract("C-X6")
def test_an_engine_that_refuses_the_model_is_not_ready(installation: Installation, http: Http) -> None:
    """With the engine's own words, and no request goes to it."""
    found = service(installation, http, "full-disk", "ready", "failed")
    assert found["state"] == "failed"
    assert found["reason"]["code"] == "readiness_failed"
    assert "no space left on device" in json.dumps(found["reason"])
    stop_and_remove(installation, http, found)


@pytest.mark.contract("C-X5", "C-X7")
@pytest.mark.parametrize("path", ["/seen", "/api/create", "/api/tags", "/api/blobs/sha256:" + "0" * 64])
def test_the_engines_own_routes_are_not_reached_over_http(
    installation: Installation, http: Http, path: str
) -> None:
    """Not even one that its endpoint contract admits for the executor's other callers."""
    found = service(installation, http, "serve-it", "ready", "failed")
    for base in (f"/inference/{found['id']}/v1", f"/inference/{found['id']}"):
        assert http("POST", f"{base}{path}", {}).status in (404, 405)
    stop_and_remove(installation, http, found)
