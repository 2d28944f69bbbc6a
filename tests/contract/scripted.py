"""A whole installation whose engine is `engine.py`, run by an adapter that was installed beside ficc."""

from __future__ import annotations

import http.client
import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

from support.executor import CACHE, PYTHON, python_image
from support.http import Answer, Http, http_of
from support.installation import Installation

HERE = Path(__file__).parent
ENTRY_POINTS = """\
[ficc.inference]
scripted = scripted_adapter:Scripted
watched = scripted_adapter:Watched
of_another_version = scripted_adapter:OfAnotherVersion
without_a_version = scripted_adapter:WithoutAVersion
"""
LIMITS = {
    "cpu_millis": 200,
    "memory_bytes": 160 << 20,
    "processes": 32,
    "storage_bytes": 1 << 20,
    "storage_inodes": 64,
}


def install_adapter(directory: Path) -> Path:
    """The distribution, as an installer lays it out; the directory it is in."""
    metadata = directory / "scripted_adapter-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (directory / "scripted_adapter.py").write_bytes((HERE / "adapter.py").read_bytes())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-adapter\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    for path in (directory, metadata, *directory.glob("*.py"), *metadata.iterdir()):
        path.chmod(0o755)  # the controller has an account of its own
    return directory


class ScriptedInstallation(Installation):
    """What is asked over HTTP is asked as its owner; `api` answers refusals instead of raising them."""

    def __init__(self, directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        python_image()
        self.adapter = install_adapter(directory / "adapter")
        path = [str(self.adapter), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {"PYTHONPATH": os.pathsep.join(path), **(settings or {})}
        super().__init__(directory, images=CACHE / "store", settings=found)

    @property
    def http(self) -> Http:
        return http_of(self)

    def caller(self, *scopes: str) -> Http:
        """Somebody with a token of the owner's that has these scopes only."""
        wanted = {"label": " ".join(scopes)[:64], "scopes": scopes}
        return Http(self.origin, self.http("POST", "/tokens", wanted).ok(201)["token"])

    # Models and services.

    def model(self, name: str = "scripted", capabilities: list[str] | None = None) -> dict[str, Any]:
        """A verified model: the engine's own script."""
        file = self.directory / "engine.gguf"
        file.write_bytes((HERE / "engine.py").read_bytes())
        return self.add_model(file, name, capabilities or ["chat", "embeddings"])

    @cached_property
    def model_id(self) -> str:
        return str(self.model()["id"])

    @cached_property
    def node_id(self) -> str:
        return str(self.node()["id"])

    @cached_property
    def python(self) -> dict[str, Any]:
        """The runtime of the scripted engine."""
        return self.runtime("tests/python")

    def spec(self, alias: str, replicas: int = 1, **changes: Any) -> dict[str, Any]:
        """Small replicas on the one node, a document of the caller's own."""
        return {
            "alias": alias,
            "model_id": self.model_id,
            "engine": "scripted",
            "runtime": dict(self.python),
            "executable": PYTHON,
            "context": 512,
            "concurrency": 2,
            "placements": [{"node_id": self.node_id, "limits": dict(LIMITS)} for _ in range(replicas)],
            "deadline_seconds": 120,
            **changes,
        }

    def service(self, alias: str, replicas: int = 1, **changes: Any) -> dict[str, Any]:
        """A ready service."""
        made = self.http("POST", "/inference", self.spec(alias, replicas, **changes)).ok(202)
        ready = self.settled(made["id"], "ready", "failed")
        assert ready["state"] == "ready", ready["reason"]
        return ready

    def record(self, service_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http("GET", f"/inference/{service_id}").ok()
        return found

    def control(self, service_id: str, action: str, **more: Any) -> Answer:
        """An action at the revision that the service has now, read again if its state moved on meanwhile."""
        while True:
            body = {"revision": self.record(service_id)["revision"], **more}
            answer = self.http("POST", f"/inference/{service_id}/control/{action}", body)
            if answer.status != 409 or answer.code != "revision_conflict":
                return answer

    def stopped(self, service_id: str) -> dict[str, Any]:
        """The service at rest, with every attempt released."""
        if self.record(service_id)["state"] not in ("stopped", "failed"):
            self.control(service_id, "stop").ok(202)
        found: dict[str, Any] | None = self.until(
            lambda: self._at_rest(service_id), f"{service_id} is at rest"
        )
        assert found is not None
        return found

    def _at_rest(self, service_id: str) -> dict[str, Any] | None:
        record = self.record(service_id)
        ended = record["state"] in ("stopped", "failed")
        return record if ended and all(one["released"] for one in record["replicas"]) else None

    def remove(self, service_id: str) -> None:
        self.stopped(service_id)
        self.control(service_id, "remove").ok(202)

    # The engine.

    def chat(self, service_id: str, http: Http | None = None, **body: Any) -> Answer:
        return (http or self.http)("POST", f"/inference/{service_id}/v1/chat/completions", body)

    def report(self, service_id: str) -> dict[str, Any]:
        """What a replica says of itself and of the requests it saw."""
        found: dict[str, Any] = self.chat(service_id, do="report").ok()
        return found

    def seen(self, service_id: str, key: str) -> dict[str, int]:
        """Of one request: how many times it came, and how many of those are over."""
        found: dict[str, int] = self.report(service_id)["seen"].get(key, {"times": 0, "closed": 0})
        return found

    def times(self, service_id: str, key: str) -> int:
        """How many times the engines of all current attempts saw a request, by their logs."""
        logs = [
            self.http("GET", f"/inference/{service_id}/logs", replica=str(index)).ok()["text"]
            for index in range(len(self.record(service_id)["replicas"]))
        ]
        return sum(text.splitlines().count(f"request {key}") for text in logs)

    def plans(self) -> dict[str, dict[str, Any]]:
        """Every plan that is recorded, by its digest."""
        file = self.directory / "controller" / "ficc.sqlite"
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
            return {
                digest: json.loads(plan)
                for digest, plan in db.execute("SELECT plan_digest, plan FROM workloads")
            }

    def plan_of(self, service: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of its first replica."""
        return self.plans()[service["replicas"][0]["plan_digest"]]


class Open:
    """A chat request that was sent and whose answer nobody has read yet."""

    def __init__(self, installation: Installation, service_id: str, **body: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", installation.port, timeout=60)
        headers = {"authorization": f"Bearer {installation.token}", "content-type": "application/json"}
        path = f"/api/v1/inference/{service_id}/v1/chat/completions"
        self._connection.request("POST", path, json.dumps(body), headers)
        self._answer: http.client.HTTPResponse | None = None

    def answer(self) -> http.client.HTTPResponse:
        self._answer = self._connection.getresponse()
        return self._answer

    def close(self) -> None:
        """Leave, whatever is still to come."""
        self._connection.close()
        if self._answer is not None:
            self._answer.close()
