"""A real executor process on a state directory of its own, and what tests ask of it.

Directories are short and open to all: the path of a unix socket has at most 107 bytes, and some tests connect
under another account.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ficc import clock
from ficc.client.executor import Control, EndpointLink, EndpointStream, fence_document
from ficc.domain.errors import Refused
from ficc.domain.lease import Renew
from ficc.domain.plan import Endpoint, Fence, Input, Limits, Plan, Runtime
from ficc.executor.cgroups import read_mounts
from ficc.identifiers import new_id
from ficc.images.build import Recipe, build_python_image
from ficc.images.record import ImageRecord
from ficc.images.store import ImageStore

CACHE = Path(os.environ.get("FICC_TEST_CACHE", Path(__file__).parents[2] / ".cache")) / "executor"
PYTHON = "/usr/bin/python3"
ENGINE = Path(__file__).with_name("scripted_engine.py")
SOCKET = "/run/ficc/engine.sock"
ROUTE = "/v1/chat/completions"
PATIENCE_SECONDS = float(os.environ.get("FICC_TEST_PATIENCE_SECONDS", "30"))
"""How long anything here may take before a test gives up: the machine may be busy with other things, or emulated."""
TTL_SECONDS = 60
LIMITS = Limits(
    cpu_millis=500, memory_bytes=128 << 20, processes=32, storage_bytes=8 << 20, storage_inodes=256
)

REPLICA_LIMITS = replace(LIMITS, processes=128)
"""An engine has a thread for each request."""


def image_store() -> ImageStore:
    return ImageStore(CACHE / "store")


def python_image(suite: str | None = None) -> ImageRecord:
    """An image with nothing but Python, built once and kept: of this machine's suite, or another."""
    return build_python_image(
        image_store(),
        Recipe(name="tests/python", entrypoint=(PYTHON,), files=(), suite=suite),
        work_dir=CACHE / "work",
        cache_dir=CACHE,
        progress=print,
    )


def has_delegated_group() -> bool:
    """Whether this process is in a group of v2 that its account may divide."""
    own = read_mounts(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    return own.v2 is not None and not own.v1 and os.access(own.v2 / "cgroup.subtree_control", os.W_OK)


def cgroups_named(name: str) -> list[str]:
    """Directories and files of control groups whose names hold this text. What others remove meanwhile is passed
    over, where `Path.rglob` would raise."""
    return [
        os.path.join(directory, entry)
        for directory, *entries in os.walk("/sys/fs/cgroup")
        for entry in itertools.chain(*entries)
        if name in entry
    ]


def leftovers(name: str) -> list[str]:
    """Cgroups, mounts and processes whose names hold this text."""
    found = cgroups_named(name)
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            if name in path.read_text() and is_alive(int(path.parent.name)):
                found.append(str(path))
    return found


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} within {seconds} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class ExecutorProcess:
    """One state directory and the executor that runs on it, if one does."""

    directory: Path
    process: subprocess.Popen[bytes] | None = None
    provider: str = "bubblewrap"

    @classmethod
    @contextlib.contextmanager
    def on_new_directory(cls, provider: str = "bubblewrap") -> Iterator[ExecutorProcess]:
        """Started; on the way out ended, with proof that nothing is left."""
        directory = Path(tempfile.mkdtemp(prefix="ficc-x-"))
        directory.chmod(0o755)
        executor = cls(directory, provider=provider)
        try:
            (directory / "executor").mkdir()
            python_image()
            (directory / "executor" / "images").symlink_to(CACHE / "store")
            executor.start()
            yield executor
            if executor.returncode is None:
                asyncio.run(end_all(executor))
            executor.end()
        finally:
            executor.clear()
            shutil.rmtree(directory)

    # The process.

    @property
    def socket(self) -> Path:
        return self.directory / "run" / "executor.sock"

    @property
    def state(self) -> Path:
        return self.directory / "executor"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def launch(self) -> subprocess.Popen[bytes]:
        """An executor on this directory, with descriptors open that nobody told it of."""
        stray = os.open("/etc/passwd", os.O_RDONLY)
        try:
            with (self.directory / "log").open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "ficc.executor", str(self.directory)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[stray],
                    env={
                        **os.environ,
                        "FICC_LOG_FORMAT": "json",
                        "FICC_EXECUTOR_PROVIDER": self.provider,
                    },
                )
        finally:
            os.close(stray)

    def start(self) -> None:
        self.process = self.launch()
        wait_for(lambda: self._answers() or self.returncode is not None, "the executor answers")
        assert self.returncode is None, self.log

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self.socket))
            except OSError:
                return False
            return True

    @property
    def returncode(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    @property
    def watchdog(self) -> int:
        """The process id of its watchdog."""
        for path in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            if b"ficc.executor.watchdog" in Path(f"/proc/{path}/cmdline").read_bytes():
                return int(path)
        raise AssertionError("no watchdog")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal and wait for the end."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(PATIENCE_SECONDS)

    def end(self) -> None:
        """Shut down in order: nothing may be left."""
        if self.returncode is None:
            self.kill(signal.SIGTERM)
            assert self.returncode == 0, self.log
            assert not self.socket.exists()
        assert leftovers(self.executor_id) == []

    def clear(self) -> None:
        """Whatever a failed test left."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 5
        while (left := leftovers(self._name())) and time.monotonic() < deadline:
            time.sleep(0.05)  # the watchdog ends the processes
            for group in (Path(path) for path in left if path.startswith("/sys/fs/cgroup")):
                for path in (*(child for child in group.rglob("*") if child.is_dir()), group):
                    with contextlib.suppress(OSError):
                        path.rmdir()

    def _name(self) -> str:
        try:
            return self.executor_id
        except Exception:
            return "no such executor"

    @property
    def executor_id(self) -> str:
        with contextlib.closing(sqlite3.connect(f"file:{self.state}/ledger.sqlite?mode=ro", uri=True)) as db:
            return str(db.execute("SELECT executor_id FROM identity").fetchone()[0])

    # What it is given.

    def put_blob(self, data: bytes) -> str:
        """A verified blob of the content store; its digest."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.blob(sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(data)
            path.chmod(0o444)
        return sha256

    def blob(self, sha256: str) -> Path:
        return self.directory / "content" / "blobs" / sha256[:2] / sha256

    def input(self, name: str, data: bytes) -> Input:
        return Input(new_id(), self.put_blob(data), len(data), name)


@dataclass
class Session:
    """Connected: `control` for calls, `leases` for renewals, `link` for endpoints."""

    executor: ExecutorProcess
    control: Control
    leases: Control
    link: EndpointLink
    hello: dict[str, Any]
    runtime: Runtime
    events: list[dict[str, Any]]

    # Plans.

    def plan(
        self,
        script: str | None = None,
        *,
        argv: Sequence[str] = (),
        limits: Limits = LIMITS,
        inputs: Sequence[Input] = (),
        environment: Mapping[str, str] | None = None,
        endpoint: Endpoint | None = None,
        **changes: Any,
    ) -> Plan:
        """Of a job that runs a script, or a command."""
        command = tuple(argv) or (PYTHON, "-IBc", script or "")
        plan = Plan(
            node_id=self.hello["executor_id"],
            runtime=self.runtime,
            argv=command,
            environment=dict(environment or {}),
            limits=limits,
            inputs=tuple(inputs),
            endpoint=endpoint,
        )
        return Plan.from_json({**plan.as_json(), **changes}) if changes else plan

    def replica(
        self, mode: str = "serve", *, concurrency: int = 64, port: int | None = None, **changes: Any
    ) -> Plan:
        """Of the scripted engine behind an endpoint: its unix socket, or a TCP port."""
        script = self.executor.input("engine.py", ENGINE.read_bytes())
        changes.setdefault("limits", REPLICA_LIMITS)
        transport: Literal["unix", "tcp"] = "unix" if port is None else "tcp"
        target = SOCKET if port is None else port
        endpoint = Endpoint(transport, target, (("POST", ROUTE),), 1 << 20, concurrency)
        argv = (PYTHON, "-IB", "/inputs/engine.py", str(target), mode)
        return self.plan(argv=argv, inputs=(script,), endpoint=endpoint, **changes)

    # Calls.

    async def admit(
        self, plan: Plan, fence: Fence | None = None, *, ttl_seconds: int = TTL_SECONDS, **lease: Any
    ) -> Fence:
        fence = fence or Fence(new_id(), 1, plan.digest)
        first = {**asdict(self.renewal(1, ttl_seconds)), **lease}
        await self.control.call("admit", fence=fence_document(fence), plan=plan.as_json(), lease=first)
        return fence

    def renewal(self, sequence: int, ttl_seconds: int = TTL_SECONDS) -> Renew:
        return Renew(sequence, clock.boot_id(), clock.now_ns(), ttl_seconds)

    async def renew(self, fence: Fence, renewal: Renew) -> dict[str, Any]:
        """The one result. A refusal is in it."""
        one = {"fence": fence_document(fence), "lease": asdict(renewal)}
        answer = await self.leases.call("renew", leases=[one])
        (result,) = answer["results"]
        return dict(result)

    async def act(self, operation: str, fence: Fence, **arguments: Any) -> dict[str, Any]:
        answer = await self.control.call(operation, fence=fence_document(fence), **arguments)
        return dict(answer.get("attempt", answer))

    async def stop(self, fence: Fence, grace_seconds: float = 5.0, **changes: Any) -> dict[str, Any]:
        reason = {"code": "stopped", "message": "A test stopped it."}
        arguments = {"reason": reason, "outcome": "cancelled", "grace_seconds": grace_seconds, **changes}
        return await self.act("stop", fence, **arguments)

    async def status(self, fence: Fence) -> dict[str, Any]:
        answer = await self.control.call("status", attempt_id=fence.attempt_id)
        return dict(answer["attempt"])

    async def until(self, fence: Fence, *states: str) -> dict[str, Any]:
        """The attempt, once it is in one of the states."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (status := await self.status(fence))["state"] not in states:
            assert time.monotonic() < deadline, f"{states} expected, it is {status}"
            assert status["state"] != "released", f"{states} expected, it is {status}"
            await asyncio.sleep(0.01)
        return status

    async def run(self, plan: Plan, **lease: Any) -> Fence:
        """Admitted, prepared and started."""
        fence = await self.admit(plan, **lease)
        await self.until(fence, "prepared")
        await self.act("start", fence)
        return fence

    async def finished(self, plan: Plan) -> dict[str, Any]:
        """How an attempt of this plan ends by itself."""
        return await self.until(await self.run(plan), "released")

    async def output(self, fence: Fence) -> str:
        return str((await self.act("log", fence))["text"])

    async def serving(self, plan: Plan, **lease: Any) -> Fence:
        """Running, and its engine answers."""
        fence = await self.run(plan, **lease)
        await self.until(fence, "running")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                await self.ask(fence, do="json")
            except Refused:
                if time.monotonic() > deadline:
                    raise
            else:
                return fence
            await asyncio.sleep(0.02)

    async def end_all(self) -> None:
        """Stop every attempt that is held, at once, and wait until it is released."""
        for document in (await self.control.call("snapshot"))["attempts"]:
            fence = Fence(*(document[name] for name in ("attempt_id", "generation", "plan_digest")))
            await self.stop(fence, 0)
            await self.until(fence, "released")

    # Endpoints.

    async def open(self, fence: Fence, deadline_seconds: float = 60.0, **request: Any) -> EndpointStream:
        """An invocation of the scripted engine."""
        body = json.dumps(request).encode()
        return await self.link.open_stream(fence, ROUTE, body, deadline_seconds)

    async def ask(self, fence: Fence, **request: Any) -> Answer:
        return await whole(await self.open(fence, **request))

    async def report(self, fence: Fence, key: str) -> dict[str, Any]:
        """What the engine remembers under a key."""
        return dict(json.loads((await self.ask(fence, do="report", key=key)).body))


@dataclass
class Answer:
    status: int
    content_type: str
    body: bytes
    pieces: list[int]


async def whole(stream: EndpointStream) -> Answer:
    """Read to the end. Raises Refused for an answer that breaks."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        first = await stream.read()
        assert first.head is not None
        body, pieces, end = bytearray(first.data), [len(first.data)], first.end
        while not end:
            piece = await stream.read()
            assert piece.head is None
            body += piece.data
            pieces.append(len(piece.data))
            end = piece.end
    return Answer(first.head.status, first.head.content_type, bytes(body), pieces)


@contextlib.asynccontextmanager
async def connected(executor: ExecutorProcess) -> AsyncIterator[Session]:
    events: list[dict[str, Any]] = []
    control, leases, link = Control(events.append), Control(), EndpointLink()
    try:
        hello = await control.open(executor.socket, "control")
        await leases.open(executor.socket, "control")
        await link.open(executor.socket, "endpoint")
        answer = await control.call("subscribe")
        digest = python_image().image_digest
        (runtime,) = (r for r in answer["snapshot"]["runtimes"] if r["image_digest"] == digest)
        names = Runtime.__dataclass_fields__
        yield Session(
            executor,
            control,
            leases,
            link,
            hello,
            Runtime(**{name: runtime[name] for name in names}),
            events,
        )
    finally:
        for connection in (control, leases, link):
            connection.close()


def serving_engine(executor: ExecutorProcess, **changes: Any) -> Fence:
    """A replica that serves for as long as the tests of a module take."""

    async def begin() -> Fence:
        async with connected(executor) as session:
            return await session.serving(session.replica(**changes), ttl_seconds=3600)

    return asyncio.run(begin())


@contextlib.asynccontextmanager
async def connected_to(executor: ExecutorProcess, engine: Fence) -> AsyncIterator[Session]:
    """Connected; afterwards the engine must still answer."""
    async with connected(executor) as session:
        yield session
        assert (await session.ask(engine, do="json")).status == 200


async def end_all(executor: ExecutorProcess) -> None:
    async with connected(executor) as session:
        await session.end_all()
