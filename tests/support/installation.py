"""A whole installation for tests: real controller and executor processes on a state directory of their own,
with the API client of its owner."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from ficc.client.api import Api
from ficc.images.build import LLAMA_SERVER, build_llama_cpp
from ficc.images.store import ImageStore
from support.model import CACHE

T = TypeVar("T")

START_SECONDS = 40.0
STOP_SECONDS = 40.0


def llama_images() -> Path:
    """An image store that holds the real engine's image, built once and kept between runs."""
    folder = CACHE / "runtime-image"
    build_llama_cpp(ImageStore(folder / "store"), work_dir=folder / "work", cache_dir=folder, progress=print)
    return folder / "store"


class Installation:
    """`images`: a directory of imported images to share; without it the executor has none."""

    def __init__(
        self,
        directory: Path,
        *,
        images: Path | None = None,
        settings: Mapping[str, str] | None = None,
        command: Sequence[str] = ("-m",),
    ) -> None:
        self.directory = directory
        self.command = command
        """What stands between Python and the name of a module."""
        self.environment = {
            **os.environ,
            "FICC_STATE_DIRECTORY": str(directory),
            "FICC_SERVER_LISTEN": "127.0.0.1:0",
            "FICC_CONTENT_RESERVE_BYTES": "0",
            "FICC_HUB_ENDPOINT": "https://127.0.0.1:9",  # refused, unless a test has a hub: nothing leaves
            **(settings or {}),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs = {name: directory / f"{name}.log" for name in ("controller", "executor")}
        executor = directory / "executor"
        executor.mkdir(parents=True, exist_ok=True)
        if images is not None and not (executor / "images").exists():
            (executor / "images").symlink_to(images)

    # Processes.

    def __enter__(self) -> Self:
        """Started; on the way out, also of a start that failed, it is stopped."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *names: str) -> None:
        """Start these processes (all of them without names) and wait until each is there for others."""
        for name in names or ("executor", "controller"):
            if name == "controller":
                self.address_file.unlink(missing_ok=True)
            with self.logs[name].open("ab") as log:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, *self.command, f"ficc.{name}"],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            ready = self.executor_socket if name == "executor" else self.address_file
            self.until(ready.exists, f"the {name} is up", partial(self._check, name))

    def _check(self, name: str) -> None:
        process = self.processes[name]
        assert process.poll() is None, f"the {name} ended:\n{self.logs[name].read_text()[-3000:]}"

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process and wait for its end."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(STOP_SECONDS)
        if name == "executor" and number == signal.SIGKILL:
            self.executor_socket.unlink(missing_ok=True)

    def stop(self) -> None:
        for name in ("controller", "executor"):
            if name in self.processes:
                self.kill(name, signal.SIGTERM)

    @property
    def address_file(self) -> Path:
        return self.directory / "controller" / "address.json"

    @property
    def executor_socket(self) -> Path:
        return self.directory / "run" / "executor.sock"

    @property
    def origin(self) -> str:
        return str(json.loads(self.address_file.read_text())["origin"])

    @property
    def port(self) -> int:
        return int(self.origin.rsplit(":", 1)[1])

    @property
    def token(self) -> str:
        """The owner's."""
        return (self.directory / "controller" / "owner-token").read_text().strip()

    # Calls.

    def api(self, token: str | None = None) -> Api:
        return Api(self.origin, self.token if token is None else token or None)

    def run(self, work: Callable[[Api], Awaitable[T]]) -> T:
        """Run something against the API in a loop of its own."""

        async def go() -> T:
            async with self.api() as api:
                return await work(api)

        return asyncio.run(go())

    def call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        return self.run(lambda api: api.call(method, path, body, query=query or None))

    def node(self) -> dict[str, Any]:
        """The one node, once it is connected."""

        def connected() -> dict[str, Any] | None:
            items = self.call("GET", "/contributors")["items"]
            return items[0] if items and items[0]["connected"] else None

        found: dict[str, Any] = self.until(connected, "the node is connected")
        return found

    def runtime(self, name: str = "ficc/llama-cpp") -> dict[str, Any]:
        first = next(runtime for runtime in self.node()["runtimes"] if runtime["name"] == name)
        return {k: first[k] for k in ("provider", "package_digest", "image_digest", "isolation", "network")}

    def add_model(self, path: Path, name: str, capabilities: list[str] | None = None) -> dict[str, Any]:
        """Register a file and upload its bytes."""
        data = path.read_bytes()
        manifest: dict[str, Any] = {
            "name": name,
            "format": "gguf",
            "files": [{"name": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}],
        }
        if capabilities is not None:
            manifest["capabilities"] = capabilities

        async def work(api: Api) -> Any:
            model = await api.call("POST", "/models", manifest)
            offset = model["files"][0]["offset"]
            while model["state"] != "ready":
                answer = await api.upload(model["id"], 0, offset, data[offset : offset + (16 << 20)])
                offset = answer["offset"]
                model = await api.call("GET", f"/models/{model['id']}")
            return model

        found: dict[str, Any] = self.run(work)
        return found

    def specification(self, alias: str, model_id: str, **changes: Any) -> dict[str, Any]:
        """One replica on the one node, small."""
        limits = {
            "cpu_millis": 1000,
            "memory_bytes": 768 << 20,
            "processes": 64,
            "storage_bytes": 32 << 20,
            "storage_inodes": 1024,
        }
        return {
            "alias": alias,
            "model_id": model_id,
            "engine": "llama_cpp",
            "runtime": self.runtime(),
            "executable": LLAMA_SERVER,
            "context": 512,
            "concurrency": 2,
            "placements": [{"node_id": self.node()["id"], "limits": limits}],
            "deadline_seconds": 120,
            **changes,
        }

    def settled(self, service_id: str, *states: str, seconds: float = 90.0) -> dict[str, Any]:
        """The service once it is in one of these states."""

        def look() -> dict[str, Any] | None:
            service: dict[str, Any] = self.call("GET", f"/inference/{service_id}")
            return service if service["state"] in states else None

        found: dict[str, Any] = self.until(look, f"{service_id} is {' or '.join(states)}", seconds=seconds)
        return found

    def until(
        self,
        look: Callable[[], T],
        what: str,
        each: Callable[[], None] | None = None,
        seconds: float = START_SECONDS,
    ) -> T:
        """Look until there is something."""
        deadline = time.monotonic() + seconds
        while True:
            found = look()
            if found:
                return found
            if each is not None:
                each()
            assert time.monotonic() < deadline, f"after {seconds:.0f} s: not {what}\n{self._last_words()}"
            time.sleep(0.05)

    def _last_words(self) -> str:
        return "\n".join(
            f"--- {name}\n{log.read_text()[-2000:]}" for name, log in self.logs.items() if log.exists()
        )
