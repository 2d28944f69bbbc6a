"""An installation that runs batch jobs: scripts for a plain Python, in real sandboxes."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.executor import CACHE, PYTHON, python_image
from support.http import Answer, Http, http_of
from support.installation import Installation

LIMITS = {
    "cpu_millis": 200,
    "memory_bytes": 96 << 20,
    "processes": 24,
    "storage_bytes": 4 << 20,
    "storage_inodes": 64,
}
SLEEP = "import time; time.sleep(600)"


class JobInstallation(Installation):
    """Refusals are answers, not exceptions."""

    def __init__(self, directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        python_image()
        super().__init__(directory, images=CACHE / "store", settings=settings)

    @property
    def http(self) -> Http:
        return http_of(self)

    def job(self, script: str = "", **changes: Any) -> dict[str, Any]:
        """What a client sends to run a script."""
        return {
            "node_id": self.node()["id"],
            "runtime": self.runtime("tests/python"),
            "argv": [PYTHON, "-IBc", script],
            "limits": dict(LIMITS),
            "deadline_seconds": 120,
            **changes,
        }

    def submitted(self, script: str = "", **changes: Any) -> str:
        return str(self.http("POST", "/workloads", self.job(script, **changes)).ok(202)["id"])

    def record(self, workload_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http("GET", f"/workloads/{workload_id}").ok()
        return found

    def act(self, workload_id: str, action: str, **members: Any) -> Answer:
        """An action at the revision that the workload has now, read again if it moved on meanwhile."""
        while True:
            body = {"revision": self.record(workload_id)["revision"], **members}
            answer = self.http("POST", f"/workloads/{workload_id}/{action}", body)
            if answer.status != 409 or answer.code != "revision_conflict":
                return answer

    def in_state(self, workload_id: str, *states: str, seconds: float = 60.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            record = self.record(workload_id)
            return record if record["state"] in states else None

        found = self.until(look, f"{workload_id} is {' or '.join(states)}", seconds=seconds)
        assert found is not None
        return found

    def ended(self, workload_id: str, seconds: float = 60.0) -> dict[str, Any]:
        """The workload once it has an outcome and is released."""

        def look() -> dict[str, Any] | None:
            record = self.record(workload_id)
            return record if record["state"] == "ended" and record["released"] else None

        found = self.until(look, f"{workload_id} is released", seconds=seconds)
        assert found is not None
        return found

    def outcome(self, workload_id: str) -> tuple[str, str]:
        """Of a workload that is released: its outcome and the code of its reason."""
        record = self.ended(workload_id)
        return record["outcome"], record["reason"]["code"]

    # What it left.

    def part(self, workload_id: str, **wanted: Any) -> Answer:
        return self.http("POST", f"/workloads/{workload_id}/output", wanted)

    def log(self, workload_id: str, **wanted: Any) -> str:
        return b"".join(self.parts(workload_id, stream="log", **wanted)).decode()

    def output(self, workload_id: str, name: str, **wanted: Any) -> bytes:
        return b"".join(self.parts(workload_id, name=name, **wanted))

    def parts(self, workload_id: str, **wanted: Any) -> Iterator[bytes]:
        offset = 0
        while True:
            part = self.part(workload_id, offset=offset, **wanted).ok()
            data = base64.b64decode(part["data"])
            assert (part["offset"], part["next_offset"]) == (offset, offset + len(data))
            if not data:
                return
            yield data
            offset = part["next_offset"]
