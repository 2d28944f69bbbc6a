"""A controller for crash tests: killed at any moment, or at a chosen point of its code."""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.http import Http, http_of
from support.installation import Installation
from support.rows import manifest_of, random_bytes

KILLING = Path(__file__).parent / "killing"


class Doomed:
    """A controller that can be killed at any moment, or at a chosen point of its code."""

    def __init__(self, directory: Path) -> None:
        self.orders = directory / "kill"
        search = os.pathsep.join(filter(None, (str(KILLING), os.environ.get("PYTHONPATH"))))
        self.installation = Installation(
            directory, settings={"PYTHONPATH": search, "FICC_TEST_KILL_FILE": str(self.orders)}
        )
        self.installation.start("controller")

    @property
    def api(self) -> Http:
        return http_of(self.installation)

    def killed_at(self, point: str, request: Callable[[], object]) -> None:
        """Make a request that ends the controller at this point, and start it again."""
        self.orders.write_text(point)
        self.orders.chmod(0o644)
        with suppress(OSError, http.client.HTTPException):
            request()
        process = self.installation.processes.pop("controller")
        assert process.wait(30) == -9, f"it did not come to {point}"
        self.orders.unlink()
        self.installation.start("controller")

    def kill(self) -> None:
        self.installation.kill("controller")

    def file(self, model_id: str) -> dict[str, object]:
        found: dict[str, object] = self.api("GET", f"/models/{model_id}").ok()["files"][0]
        return found

    def register(self, *contents: bytes, size: int | None = None, digest: str | None = None) -> str:
        document = manifest_of(*contents, name=random_bytes(6).hex())
        if size is not None:
            document["files"][0].update(bytes=size, sha256=digest)
        return str(self.api("POST", "/models", document).ok(201)["id"])

    @property
    def content(self) -> Path:
        return self.installation.directory / "content"

    def partial(self, digest: str) -> Path | None:
        return next(self.content.glob(f"partials/*/{digest}"), None)

    def blob(self, digest: str) -> Path:
        return self.content / "blobs" / digest[:2] / digest

    def put(self, name: str, write: Callable[[Path], None]) -> Path:
        """A file of the controller's own account."""
        path = self.content / name
        path.parent.mkdir(exist_ok=True)
        write(path)
        owner = self.content.stat()
        for one in (path, path.parent):
            os.chown(one, owner.st_uid, owner.st_gid)
        return path
