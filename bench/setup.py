"""A real installation for the benchmarks: controller, executor, sandbox, with the stand-in as its engine; and the
same stand-in reached directly."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.load import Target
from ficc.client.api import Api
from ficc.domain.plan import Runtime
from ficc.images.build import LLAMA_SERVER, ImageFile, Recipe, build_python_image
from ficc.images.store import ImageStore

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "bench"
ENGINE = Path(__file__).with_name("engine.py")
READY_SECONDS = 60
SERVICES = {"few": (1, 256, 2000), "many": (4, 256, 500)}
"""Of each service: replicas, concurrency of each, thousandths of a core for each. Only one runs at a time."""


class Bench:
    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.services: dict[str, dict[str, Any]] = {}
        self.token = ""
        self._direct_port = 0
        self._node: dict[str, Any] = {}
        self._model_id = ""

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in ("controller", "executor", "direct"):
            process = self.processes.get(name)
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait()

    def relayed(self, service: str = "few") -> Target:
        path = f"{self.services[service]['endpoint']}/chat/completions"
        return Target("127.0.0.1", self.port, path, self.token, service)

    @property
    def direct(self) -> Target:
        return Target("127.0.0.1", self._direct_port)

    @property
    def ours(self) -> list[int]:
        """The processes whose cost is ours: controller and executor."""
        return [self.processes[name].pid for name in ("controller", "executor")]

    @property
    def origin(self) -> str:
        return str(json.loads((self.state / "controller" / "address.json").read_text())["origin"])

    @property
    def port(self) -> int:
        return int(self.origin.rsplit(":", 1)[1])

    def api(self) -> Api:
        return Api(self.origin, (self.state / "controller" / "owner-token").read_text().strip())

    def prepare(self) -> None:
        """Build the image, start everything, and wait until the services are ready."""
        store = ImageStore(CACHE / "images")
        recipe = Recipe(
            name="ficc/bench",
            entrypoint=(LLAMA_SERVER,),
            files=(ImageFile(LLAMA_SERVER.removeprefix("/"), ENGINE.read_bytes(), executable=True),),
        )
        build_python_image(store, recipe, work_dir=CACHE / "work", cache_dir=CACHE, progress=_say)
        (self.state / "executor").mkdir(parents=True)
        (self.state / "executor" / "images").symlink_to(CACHE / "images")
        self._start("executor", self.state / "run" / "executor.sock")
        self._start("controller", self.state / "controller" / "address.json")
        self._start_direct()
        asyncio.run(self._serve())

    def _start(self, name: str, ready: Path) -> None:
        environment = {
            **os.environ,
            "FICC_STATE_DIRECTORY": str(self.state),
            "FICC_SERVER_LISTEN": "127.0.0.1:0",
            "FICC_LOG_LEVEL": "warning",
            "FICC_CONTENT_RESERVE_BYTES": "0",
        }
        self.processes[name] = subprocess.Popen([sys.executable, "-m", f"ficc.{name}"], env=environment)
        until = time.monotonic() + READY_SECONDS
        while not ready.exists():
            if self.processes[name].poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the {name} did not come up")
            time.sleep(0.05)

    def _start_direct(self) -> None:
        process = subprocess.Popen([sys.executable, str(ENGINE)], stdout=subprocess.PIPE)
        self.processes["direct"] = process
        assert process.stdout is not None
        self._direct_port = int(process.stdout.readline().split()[1])

    async def _serve(self) -> None:
        content = b"GGUF" + bytes(60)
        file = {"name": "bench.gguf", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        async with self.api() as api:
            model = await api.call("POST", "/models", {"name": "bench", "format": "gguf", "files": [file]})
            await api.upload(model["id"], 0, 0, content)
            self._node = await self._connected_node(api)
            self._model_id = model["id"]
            scopes = {"label": "bench", "scopes": ["inference:invoke"]}
            self.token = (await api.call("POST", "/tokens", scopes))["token"]

    @property
    def node_id(self) -> str:
        return str(self._node["id"])

    @property
    def runtime(self) -> Runtime:
        first = self._node["runtimes"][0]
        return Runtime(**{member: first[member] for member in Runtime.__dataclass_fields__})

    async def rest(self) -> None:
        """Let no service run."""
        async with self.api() as api:
            for service in self.services.values():
                await self._control(api, service, "stop", "stopped")

    async def use(self, alias: str) -> None:
        """Let this service run, and no other."""
        async with self.api() as api:
            for other, service in self.services.items():
                if other != alias:
                    await self._control(api, service, "stop", "stopped")
            if alias not in self.services:
                self.services[alias] = await self._create(api, alias)
            await self._control(api, self.services[alias], "start", "ready")

    async def _control(self, api: Api, service: dict[str, Any], action: str, state: str) -> None:
        found = await api.call("GET", f"/inference/{service['id']}")
        if found["state"] != state and not (action == "start" and found["state"] == "starting"):
            body = {"revision": found["revision"]}
            await api.call("POST", f"/inference/{service['id']}/control/{action}", body)
        await self._settle(api, service["id"], state)

    async def _settle(self, api: Api, service_id: str, state: str) -> None:
        until = time.monotonic() + READY_SECONDS
        while True:
            service = await api.call("GET", f"/inference/{service_id}")
            if service["state"] == state and (
                state == "ready" or all(r["released"] for r in service["replicas"])
            ):
                return
            if service["state"] == "failed" or time.monotonic() > until:
                raise SystemExit(f"{service['alias']} is {service['state']}: {service['reason']}")
            await asyncio.sleep(0.1)

    async def _create(self, api: Api, alias: str) -> dict[str, Any]:
        replicas, concurrency, cpu_millis = SERVICES[alias]
        spec = self.specification(alias, replicas=replicas, concurrency=concurrency, cpu_millis=cpu_millis)
        service: dict[str, Any] = await api.call("POST", "/inference", spec)
        return service

    def specification(
        self, alias: str, *, replicas: int, concurrency: int, cpu_millis: int
    ) -> dict[str, Any]:
        limits = {"cpu_millis": cpu_millis, "memory_bytes": 1 << 29}
        return {
            "alias": alias,
            "model_id": self._model_id,
            "engine": "llama_cpp",
            "runtime": asdict(self.runtime),
            "executable": LLAMA_SERVER,
            "context": 128,
            "concurrency": concurrency,
            "placements": [{"node_id": self.node_id, "limits": limits}] * replicas,
        }

    async def _connected_node(self, api: Api) -> dict[str, Any]:
        while True:
            nodes = (await api.call("GET", "/contributors"))["items"]
            if nodes and nodes[0]["connected"]:
                node: dict[str, Any] = nodes[0]
                return node
            await asyncio.sleep(0.1)

    async def engine_log(self) -> str:
        async with self.api() as api:
            return str((await api.call("GET", f"/inference/{self.services['few']['id']}/logs"))["text"])


def _say(text: str) -> None:
    print(text, file=sys.stderr)
