"""A controller without an executor that fetches models from a scripted source on loopback."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.http import Answer, Http, http_of
from support.installation import Installation
from support.source import Source

RANGE_BYTES = 1 << 20
STALL_SECONDS = 2
ATTEMPTS_MAX = 3


class Registry(Installation):
    """A controller without an executor, whose sources may be on loopback."""

    def __init__(self, directory: Path, source: Source, **settings: str) -> None:
        super().__init__(
            directory,
            settings={
                "FICC_ACQUISITION_CA_FILE": str(source.ca_file),
                "FICC_ACQUISITION_ALLOWED_NETWORKS": '["127.0.0.0/8"]',
                "FICC_ACQUISITION_STALL_SECONDS": str(STALL_SECONDS),
                "FICC_ACQUISITION_MAX_ATTEMPTS": str(ATTEMPTS_MAX),
                "FICC_ACQUISITION_RANGE_BYTES": str(RANGE_BYTES),
                **settings,
            },
        )
        self.source = source

    @property
    def http(self) -> Http:
        return http_of(self)

    def register(
        self, *bodies: bytes, urls: Sequence[str | None] | None = None, **declared: Any
    ) -> dict[str, Any]:
        """A model of files that the source serves ; `declared` changes every file's entry."""
        files = []
        for index, body in enumerate(bodies):
            url = self.source.serve(f"/{os.urandom(8).hex()}", body) if urls is None else urls[index]
            files.append(
                {
                    "name": f"{index}.safetensors",
                    "bytes": len(body),
                    "sha256": hashlib.sha256(body).hexdigest(),
                    **({} if url is None else {"url": url}),
                    **declared,
                }
            )
        manifest = {"name": os.urandom(8).hex(), "format": "safetensors", "files": files}
        found: dict[str, Any] = self.http("POST", "/models", manifest).ok(201)
        return found

    def path(self, model: dict[str, Any], index: int = 0) -> str:
        return "/" + model["manifest"]["files"][index]["url"].rsplit("/", 1)[1]

    def acquire(self, model: dict[str, Any]) -> Answer:
        return self.http("POST", f"/models/{model['id']}/acquire")

    def pause(self, model: dict[str, Any]) -> Answer:
        return self.http("POST", f"/models/{model['id']}/pause")

    def model(self, model: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.http("GET", f"/models/{model['id']}").ok()
        return found

    def becomes(self, model: dict[str, Any], *states: str) -> dict[str, Any]:
        """The model once it is in one of these states."""

        def look() -> dict[str, Any] | None:
            now = self.model(model)
            return now if now["state"] in states else None

        found: dict[str, Any] = self.until(look, f"the model becomes {' or '.join(states)}")
        return found

    def blob(self, body: bytes) -> Path:
        digest = hashlib.sha256(body).hexdigest()
        return self.directory / "content" / "blobs" / digest[:2] / digest

    def offset(self, model: dict[str, Any]) -> int:
        return int(self.model(model)["files"][0]["offset"])
