"""What every provider of sandboxes must do, whoever wrote it.

A provider passes by subclassing `ProviderConformance` with a fixture `provider`. Everything is real: payloads
are Python scripts in real sandboxes, judged from inside by what they can do and from outside by what the
kernel says of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ficc.domain.plan import Endpoint, Limits, Plan, Runtime
from ficc.executor.cgroups import Tree
from ficc.executor.providers import processes
from ficc.executor.providers.contract import Exit, Launch, LaunchFailed, Provider, Sandbox
from support.executor import PYTHON, image_store, is_alive, new_id, python_image, wait_for

PROBES = Path(__file__).with_name("payloads")
ACCOUNTS = 200
"""How many each bench has."""
UID = 1_879_060_000 + os.getpid() % 4096 * ACCOUNTS
"""The first of this process's: suites that run at the same time share no account."""
PATIENCE_SECONDS = float(os.environ.get("FICC_TEST_PATIENCE_SECONDS", "20"))
MIB = 1 << 20
LIMITS = Limits(cpu_millis=1000, memory_bytes=96 * MIB, processes=24, storage_bytes=MIB, storage_inodes=64)
WRITABLE = ("/run/ficc", "/tmp", "/dev/shm")


@dataclass
class Box:
    """One sandbox and what it said."""

    launch: Launch
    sandbox: Sandbox
    output: bytearray

    @property
    def text(self) -> str:
        return self.output.decode()

    @property
    def says(self) -> Any:
        """The last line of the output, which is JSON."""
        return json.loads(self.text.splitlines()[-1])

    @property
    def payload(self) -> int:
        """The process id, here, of the process that has the payload's command."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            for pid in self.launch.group.processes():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(PYTHON.encode()):
                        return pid
        raise AssertionError(f"no payload runs: {self.text}")

    async def until(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while text not in self.text:
                await asyncio.sleep(0.005)

    async def wait(self) -> Exit:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.sandbox.wait()


@dataclass
class Bench:
    """Makes sandboxes of one provider, in cgroups of its own."""

    provider: Provider
    tree: Tree
    image_root: Path
    directory: Path
    slots: Iterator[int] = field(default_factory=lambda: iter(range(ACCOUNTS)))

    def launch(
        self,
        script: str = "",
        *,
        argv: Sequence[str] = (),
        limits: Limits = LIMITS,
        environment: Mapping[str, str] | None = None,
        inputs: Mapping[str, Path] | None = None,
        image_root: Path | None = None,
        endpoint: Endpoint | None = None,
    ) -> tuple[Launch, bytearray]:
        name = new_id()
        path = self.directory / f"{name}.py"
        path.write_text(script)
        path.chmod(0o444)
        output = bytearray()
        uid = UID + next(self.slots)
        plan = Plan(
            node_id="n",
            runtime=Runtime(self.provider.name, self.provider.package_digest, "sha256:" + 64 * "0"),
            argv=tuple(argv) or (PYTHON, "-IB", "/inputs/payload.py"),
            environment=dict(environment or {}),
            limits=limits,
            endpoint=endpoint,
        )
        launch = Launch(
            attempt_id=name,
            plan=plan,
            image_root=image_root or self.image_root,
            image_environment={"LANG": "C.UTF-8", "FROM": "image"},
            inputs={"payload.py": path, **(inputs or {})},
            group=self.tree.group(name),
            uid=uid if os.geteuid() == 0 else os.geteuid(),
            gid=uid if os.geteuid() == 0 else os.getegid(),
            write_log=output.extend,
        )
        return launch, output

    @contextlib.asynccontextmanager
    async def started(self, script: str = "", **options: Any) -> AsyncIterator[Box]:
        """A sandbox whose payload runs; on the way out killed, with proof that nothing is left."""
        launch, output = self.launch(script, **options)
        launch.group.create(launch.plan.limits)
        try:
            sandbox = await self.provider.make(launch)
            try:
                await sandbox.check()
                await sandbox.start()
                yield Box(launch, sandbox, output)
            finally:
                await asyncio.to_thread(launch.group.kill)
                await sandbox.close()
        finally:
            assert await asyncio.to_thread(launch.group.kill)
            assert await asyncio.to_thread(launch.group.remove)

    async def run(self, script: str = "", **options: Any) -> tuple[Box, Exit]:
        """Started, and waited for."""
        async with self.started(script, **options) as box:
            return box, await box.wait()


def processes_of(uid: int) -> list[int]:
    """Every process of an account, alive or zombie; of this process's own account, those that live in other
    pid namespaces."""
    shared = uid == os.geteuid()
    own = os.readlink("/proc/self/ns/pid")
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == uid and not (shared and os.readlink(path / "ns/pid") == own):
                found.append(int(path.name))
    return found


def owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    """Of this process, zombies included."""
    return set(processes.children())


def mounts() -> list[str]:
    """Of this machine, without those that other tests make for their own executors."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if "/ficc-x-" not in line.split()[4]]


@pytest.fixture(scope="session")
def python_root() -> Path:
    return image_store().root_of(python_image().image_digest)


@pytest.fixture
async def bench(provider: Provider, python_root: Path) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="ficc-p-") as directory:
        tree = Tree(f"ficc-conformance-{new_id()}")
        assert tree.unenforceable == {}
        before, mounted, had = descriptors(), mounts(), children()
        yield Bench(provider, tree, python_root, Path(directory))
        assert tree.leftovers() == []
        tree.remove()
        assert not any(path.exists() for path in [*tree.v1.values(), *([tree.v2] if tree.v2 else [])])
        assert len(descriptors()) <= len(before) + 4, "descriptors leaked"  # the loop's own come and go
        assert mounts() == mounted
        assert children() <= had, "a child was not reaped"


PRELUDE = "import ctypes, errno, json, os, socket, sys, threading, time\n"


class ProviderConformance:
    """To be subclassed as `TestNameOfProvider` with a fixture `provider`. The constants say what of a provider's
    own is seen, and is harmless."""

    ADDED_VARIABLES: Mapping[str, str] = {}
    """In the environment of every payload."""
    BLOCKED_SIGNALS: frozenset[int] = frozenset()
    """Of a terminal, which a payload has none of."""
    JOINED_SHARE = 1 / 3
    """How much of the time until a payload runs is left when the first process is in the group."""
    ROOT_MONITORS = 0
    """Processes of root's that are in the group of a sandbox, outside of its namespaces."""

    # Limits.

    async def test_limits_in_force_are_the_plan(self, bench: Bench) -> None:
        limits = Limits(1500, 100 * MIB + 5000, 30 * MIB + 5000, 17, MIB + 1, 50)
        async with bench.started("import time; time.sleep(60)", limits=limits) as box:
            assert box.launch.group.limits() == {
                "cpu_millis": 1500,
                "memory_bytes": 100 * MIB + 4096,
                "swap_bytes": 30 * MIB + 4096,
                "processes": 17,
            }
            assert box.launch.group.holds(box.payload)

    async def test_limits_that_differ_are_refused(self, bench: Bench) -> None:
        """A sandbox that was made under other limits than its plan's is not started."""
        launch, _ = bench.launch()
        launch.group.create(Limits(1000, 200 * MIB, processes=24))
        sandbox = await bench.provider.make(launch)
        try:
            with pytest.raises(LaunchFailed, match=f"memory_bytes is {200 * MIB}, not {96 * MIB}"):
                await sandbox.check()
        finally:
            launch.group.kill()
            await sandbox.close()
            launch.group.remove()

    async def test_out_of_memory(self, bench: Bench) -> None:
        async with bench.started(PRELUDE + "x = b'x' * (1 << 30)") as box:
            ended = await box.wait()
            assert ended.signal == signal.SIGKILL
            assert box.launch.group.oom_kills() > 0

    async def test_scratch_space_counts_as_memory(self, bench: Bench) -> None:
        limits = Limits(1000, 32 * MIB, processes=24, storage_bytes=64 * MIB, storage_inodes=64)
        script = "open('/dev/shm/x', 'wb').write(b'x' * (64 << 20))"
        async with bench.started(script, limits=limits) as box:
            assert await box.wait() != Exit(0, None)
            assert box.launch.group.oom_kills() > 0

    @pytest.mark.parametrize("script", ["os._exit(137)", "os.kill(os.getpid(), 9)"])
    async def test_what_only_looks_like_out_of_memory(self, bench: Bench, script: str) -> None:
        async with bench.started(PRELUDE + script) as box:
            assert (await box.wait()).signal == signal.SIGKILL
            assert box.launch.group.oom_kills() == 0

    @pytest.mark.parametrize("status", [0, 1, 7, 128, 200, 255])
    async def test_exit_status(self, bench: Bench, status: int) -> None:
        _, ended = await bench.run(f"import os; os._exit({status})")
        assert ended == Exit(status, None)

    async def test_processes(self, bench: Bench) -> None:
        script = PRELUDE + (
            "made = 0\n"
            "try:\n"
            "    while True:\n"
            "        if os.fork() == 0: time.sleep(60)\n"
            "        made += 1\n"
            "except OSError as error:\n"
            "    print(json.dumps([made, error.errno]), flush=True)\n"
            "os._exit(0)\n"
        )
        async with bench.started(script) as box:
            await box.wait()
            made, number = box.says
            assert number == errno.EAGAIN
            assert 0 < made < LIMITS.processes
            assert box.launch.group.process_limit_hits() > 0

    async def test_cpu(self, bench: Bench) -> None:
        script = PRELUDE + (
            "began, used = time.monotonic(), time.process_time()\n"
            "while time.monotonic() < began + 1: pass\n"
            "print(json.dumps(time.process_time() - used))\n"
        )
        limits = Limits(200, 96 * MIB, processes=24, storage_bytes=MIB, storage_inodes=64)
        async with bench.started(script, limits=limits) as box:
            await box.wait()
            assert box.says < 0.5
            group = box.launch.group
            stat = ((group.v1.get("cpu") or group.v2) / "cpu.stat").read_text().split()  # type: ignore[operator]
            assert int(stat[stat.index("nr_throttled") + 1]) > 0

    async def test_storage(self, bench: Bench) -> None:
        """One bound over everything that can be written, in bytes and in inodes."""
        box, _ = await bench.run((PROBES / "storage.py").read_text())
        says = box.says
        assert 0.8 * LIMITS.storage_bytes < says["bytes"] <= LIMITS.storage_bytes
        assert 0 < says["inodes"] < LIMITS.storage_inodes
        assert says["errors"] == [errno.ENOSPC, errno.ENOSPC]

    async def test_nothing_else_is_writable(self, bench: Bench) -> None:
        box, _ = await bench.run((PROBES / "writable.py").read_text())
        assert box.says["directories"] == sorted(WRITABLE)
        assert box.says["files"] == []

    # Isolation.

    async def test_network(self, bench: Bench) -> None:
        with socket.socket(socket.AF_UNIX) as abstract:
            name = f"ficc-{new_id()}"
            abstract.bind(f"\0{name}")
            abstract.listen()
            box, _ = await bench.run((PROBES / "network.py").read_text(), environment={"ABSTRACT": name})
        says = box.says
        assert says["interfaces"] == ["lo"]
        assert says["routes"] == []
        assert set(says["routes6"]) <= {"lo"}
        assert says["loopback works"] is True
        unsupported = errno.EAFNOSUPPORT
        assert says["errors"] == {
            "vsock": unsupported,
            "packet": unsupported,
            "bluetooth": unsupported,
            "alg": unsupported,
            "xdp": unsupported,
            "tipc pair": unsupported,
            "raw": errno.EPERM,
            "outside": errno.ENETUNREACH,
            "abstract": errno.ECONNREFUSED,
        }

    async def test_privileges_from_inside(self, bench: Bench) -> None:
        box, _ = await bench.run((PROBES / "privileges.py").read_text())
        says = box.says
        assert says["uid"] == [65534] * 3
        assert says["gid"] == [65534] * 3
        assert set(says["groups"]) <= {65534}
        assert says["capabilities"] == ["0" * 16] * 5
        assert says["NoNewPrivs"] == "1"
        assert says["Seccomp"] == "2"
        assert says["SigIgn of init"] == "0" * 16  # nothing of the executor's signal handling is inherited
        assert int(says["SigBlk"], 16) == sum(1 << number - 1 for number in self.BLOCKED_SIGNALS)
        assert says["RLIMIT_CORE"] == [0, 0]
        assert says["hostname"] == "sandbox"
        assert says["cwd"] == "/"

    @pytest.mark.root
    async def test_privileges_from_outside(self, bench: Bench) -> None:
        script = "import time; time.sleep(60)"
        async with bench.started(script) as first, bench.started(script) as second:
            uids, own_pids = set(), os.readlink("/proc/self/ns/pid")
            for box in (first, second):
                status = dict(
                    line.split(":\t", 1)
                    for line in Path(f"/proc/{box.payload}/status").read_text().splitlines()
                )
                assert status["Uid"].split() == [str(box.launch.uid)] * 4
                assert status["Gid"].split() == [str(box.launch.gid)] * 4
                assert set(status["Groups"].split()) <= {str(box.launch.gid)}
                assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {
                    "0" * 16
                }
                uids.add(box.launch.uid)
                for kind in ("user", "pid", "net", "ipc", "uts", "mnt", "cgroup"):
                    ours, theirs = (os.readlink(f"/proc/{pid}/ns/{kind}") for pid in ("self", box.payload))
                    assert ours != theirs, kind
                of_root = {pid for pid in box.launch.group.processes() if owner(pid) == 0}
                assert len(of_root) == self.ROOT_MONITORS
                assert {os.readlink(f"/proc/{pid}/ns/pid") for pid in of_root} <= {own_pids}
            assert len(uids) == 2
            assert 0 not in uids

    async def test_system_calls(self, bench: Bench) -> None:
        box, ended = await bench.run((PROBES / "system_calls.py").read_text())
        assert ended == Exit(0, None), box.text
        says = box.says
        assert {name: number for name, number in says["denied"].items() if number != errno.EPERM} == {}
        assert len(says["denied"]) > 25
        assert says["clone3"] == errno.ENOSYS
        assert says["threads work"] is True
        assert says["fork works"] is True
        for foreign in ("x32", "i386"):
            assert says.get(foreign, signal.SIGSYS) == signal.SIGSYS, foreign

    async def test_processes_of_the_machine_are_out_of_sight(self, bench: Bench) -> None:
        script = PRELUDE + (
            "pids = [p for p in os.listdir('/proc') if p.isdigit()]\n"
            "print(json.dumps([os.getpid(), len(pids)]))\n"
        )
        box, _ = await bench.run(script)
        own, seen = box.says
        assert own < 10
        assert seen <= 3

    async def test_descriptors(self, bench: Bench) -> None:
        """Only the standard streams, whatever is open and inheritable in the executor."""
        stray = os.open("/etc/passwd", os.O_RDONLY)
        os.set_inheritable(stray, True)
        try:
            script = PRELUDE + (
                "fds = {fd: os.readlink(f'/proc/self/fd/{fd}') for fd in range(1024)\n"
                "       if os.path.lexists(f'/proc/self/fd/{fd}')}\n"
                "print(json.dumps(fds))\n"
            )
            box, _ = await bench.run(script)
        finally:
            os.close(stray)
        assert sorted(box.says) == ["0", "1", "2"]
        assert box.says["0"] == "/dev/null"
        assert all(box.says[fd].startswith("pipe:") for fd in "12")

    async def test_environment(self, bench: Bench) -> None:
        """The image's under the plan's, and nothing of the executor's. It is private to the account."""
        secret = f"secret-{new_id()}"
        script = PRELUDE + (
            "print(json.dumps(open('/proc/self/environ').read().split('\\0')), flush=True)\ntime.sleep(60)\n"
        )
        planned = {"FROM": "plan", "EMPTY": "", "SECRET": secret, "LINES": "a\nb", "SPACE": " x=y "}
        async with bench.started(script, environment=planned) as box:
            await box.until("]")
            says = dict(entry.split("=", 1) for entry in json.loads(box.text) if entry)
            image = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
            assert says == {**self.ADDED_VARIABLES, **image, **planned}
            for pid in box.launch.group.processes():
                assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()

    async def test_inputs(self, bench: Bench) -> None:
        blobs = {}
        for name in ("model.gguf", "a/b/tokenizer.json", "a/b.json", "name with 'quotes'"):
            path = bench.directory / new_id()
            path.write_text(name)
            path.chmod(0o444)
            blobs[name] = path
        box, _ = await bench.run((PROBES / "inputs.py").read_text(), inputs=blobs)
        found = box.says["files"]
        assert set(found) == {*blobs, "payload.py"}
        for name, path in blobs.items():
            assert found[name]["text"] == name
            assert found[name]["inode"] == path.stat().st_ino  # bound, not copied
            assert found[name]["device"] == path.stat().st_dev
            assert set(found[name]["errors"].values()) <= {errno.EROFS, errno.EACCES, errno.EPERM}
            assert path.read_text() == name
        assert box.says["new file"] == errno.EROFS

    # Outputs.

    async def test_an_output_is_read_once_the_payload_ended(self, bench: Bench) -> None:
        """Also one that it left without any permission, and while nothing of it is left but its scratch space."""
        script = PRELUDE + (
            "os.makedirs('/run/ficc/deep/er')\n"
            "open('/run/ficc/deep/er/out', 'w').write('the result')\n"
            "open('/run/ficc/closed', 'w').write('mine'); os.chmod('/run/ficc/closed', 0)\n"
        )
        async with bench.started(script) as box:
            await box.wait()
            assert await asyncio.to_thread(box.launch.group.kill)
            for name, text in (("deep/er/out", b"the result"), ("closed", b"mine")):
                with os.fdopen(await asyncio.to_thread(box.sandbox.open_output, name), "rb") as file:
                    assert file.read() == text

    @pytest.mark.parametrize(
        "plant",
        [
            "os.symlink('/etc/passwd', '/run/ficc/out')",
            "open('/run/ficc/real', 'w'); os.symlink('real', '/run/ficc/out')",
            "os.symlink('/proc/self/cwd/etc/passwd', '/run/ficc/out')",
            "os.mkfifo('/run/ficc/out')",
            "os.mkdir('/run/ficc/out')",
            "s = socket.socket(socket.AF_UNIX); s.bind('/run/ficc/out')",
            "pass",
        ],
        ids=["link out", "link", "magic link", "fifo", "directory", "socket", "nothing"],
    )
    async def test_only_a_plain_file_is_an_output(self, bench: Bench, plant: str) -> None:
        async with bench.started(PRELUDE + plant) as box:
            await box.wait()
            before = descriptors()
            with pytest.raises(OSError):
                box.sandbox.open_output("out")
            assert descriptors() == before

    @pytest.mark.parametrize("name", ["way/passwd", "../etc/passwd", "/etc/passwd", "way/../../etc/passwd"])
    async def test_an_output_lies_below_the_run_directory(self, bench: Bench, name: str) -> None:
        async with bench.started(PRELUDE + "os.symlink('/etc', '/run/ficc/way')") as box:
            await box.wait()
            with pytest.raises(OSError):
                box.sandbox.open_output(name)

    # The endpoint's socket.

    async def test_connect(self, bench: Bench) -> None:
        script = PRELUDE + (
            "s = socket.socket(socket.AF_UNIX); s.bind('/run/ficc/e.sock'); s.listen()\n"
            "print('listening', flush=True)\n"
            "c, _ = s.accept(); c.sendall(b'hello'); time.sleep(60)\n"
        )
        async with bench.started(script) as box:
            await box.until("listening")
            with socket.socket(fileno=box.sandbox.connect("/run/ficc/e.sock")) as connection:
                connection.settimeout(PATIENCE_SECONDS)
                connection.setblocking(True)
                assert connection.recv(10) == b"hello"

    async def test_connect_to_a_socket_that_is_made_anew(self, bench: Bench) -> None:
        script = PRELUDE + (
            "for word in (b'first', b'other'):\n"
            "    s = socket.socket(socket.AF_UNIX); s.bind('/run/ficc/e.sock'); s.listen()\n"
            "    print('listening ' + word.decode(), flush=True)\n"
            "    for _ in range(2):\n"
            "        c, _ = s.accept(); c.sendall(word); c.close()\n"
            "    s.close(); os.unlink('/run/ficc/e.sock')\n"
            "print('done', flush=True); time.sleep(60)\n"
        )
        async with bench.started(script) as box:
            for word in ("first", "other"):
                await box.until(f"listening {word}")
                for _ in range(2):
                    with socket.socket(fileno=box.sandbox.connect("/run/ficc/e.sock")) as connection:
                        connection.settimeout(PATIENCE_SECONDS)
                        connection.setblocking(True)
                        assert connection.recv(10) == word.encode()
            await box.until("done")
            with pytest.raises(OSError):
                os.close(box.sandbox.connect("/run/ficc/e.sock"))

    @pytest.mark.parametrize(
        "plant",
        [
            "os.symlink(os.environ['HOST'], '/run/ficc/e.sock')",
            "os.symlink('real.sock', '/run/ficc/e.sock'); listen('/run/ficc/real.sock')",
            "os.mkdir('/run/ficc/d'); os.symlink('/run/ficc/d', '/run/ficc/e.sock')",
            "open('/run/ficc/e.sock', 'w')",
            "os.mkfifo('/run/ficc/e.sock')",
            "os.mkdir('/run/ficc/e.sock')",
            "pass",
            "s = socket.socket(socket.AF_UNIX); s.bind('/run/ficc/e.sock')",
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind('/run/ficc/e.sock')",
        ],
        ids=[
            "link out",
            "link",
            "link to directory",
            "file",
            "fifo",
            "directory",
            "nothing",
            "deaf",
            "datagram",
        ],
    )
    async def test_what_is_no_socket_leads_nowhere(self, bench: Bench, plant: str) -> None:
        host = bench.directory / "h.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(host))
            host.chmod(0o777)
            listener.listen()
            listener.setblocking(False)
            script = PRELUDE + (
                "def listen(path):\n"
                "    global s; s = socket.socket(socket.AF_UNIX); s.bind(path); s.listen()\n"
                f"{plant}\nprint('planted', flush=True)\ntime.sleep(60)\n"
            )
            async with bench.started(script, environment={"HOST": str(host)}) as box:
                await box.until("planted")
                with pytest.raises(OSError):
                    os.close(box.sandbox.connect("/run/ficc/e.sock"))
            with pytest.raises(BlockingIOError):
                listener.accept()

    async def test_a_way_out_of_the_directory_is_refused(self, bench: Bench) -> None:
        script = PRELUDE + (
            "os.symlink('/', '/run/ficc/up')\n"
            "s = socket.socket(socket.AF_UNIX); s.bind('/tmp/e.sock'); s.listen()\n"
            "print('planted', flush=True)\ntime.sleep(60)\n"
        )
        async with bench.started(script) as box:
            await box.until("planted")
            for path in ("/run/ficc/up/tmp/e.sock", "/run/ficc/../../tmp/e.sock", "/tmp/e.sock"):
                with pytest.raises(OSError):
                    os.close(box.sandbox.connect(path))

    async def test_a_stranger_at_the_socket_is_refused(self, bench: Bench) -> None:
        """Listening in the sandbox's own directory is not enough: the peer must be in the sandbox."""
        async with bench.started("import time; time.sleep(60)") as box:
            path = str(Path(f"/proc/{box.payload}/root") / "run/ficc/e.sock")
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.bind(path)
                stranger.listen()
                with pytest.raises(OSError, match="not of this sandbox"):
                    os.close(box.sandbox.connect("/run/ficc/e.sock"))

    async def test_connect_over_tcp(self, bench: Bench) -> None:
        """To a port of the sandbox's own loopback interface; the machine's is another."""
        script = PRELUDE + (
            "s = socket.create_server(('127.0.0.1', 8080)); print('listening', flush=True)\n"
            "c, _ = s.accept(); c.sendall(b'hello'); time.sleep(60)\n"
        )
        endpoint = Endpoint("tcp", 8080, (("POST", "/x"),), 1000, 1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with bench.started(script, endpoint=endpoint) as box:
                await box.until("listening")
                with socket.socket(fileno=box.sandbox.connect(8080)) as connection:
                    connection.setblocking(True)
                    connection.settimeout(PATIENCE_SECONDS)
                    assert connection.recv(10) == b"hello"
                with pytest.raises(ConnectionRefusedError):
                    os.close(box.sandbox.connect(listener.getsockname()[1]))

    # The end.

    async def test_terminate_reaches_the_payload(self, bench: Bench) -> None:
        script = PRELUDE + (
            "import signal\n"
            "def end(*_): os.write(1, b'asked'); os._exit(7)\n"
            "signal.signal(signal.SIGTERM, end); print('ready', flush=True)\n"
            "while True: time.sleep(60)\n"
        )
        async with bench.started(script) as box:
            await box.until("ready")
            box.sandbox.terminate()
            assert await box.wait() == Exit(7, None)
            assert "asked" in box.text
            box.sandbox.terminate()  # and again, when nothing is there
            assert await box.wait() == Exit(7, None)

    async def test_the_whole_tree_is_killed(self, bench: Bench) -> None:
        """L18: it ignores SIGTERM, forks, double-forks and starts sessions."""
        async with bench.started((PROBES / "tree.py").read_text() + "time.sleep(600)\n") as box:
            await box.until("ready")
            assert len(processes_of(box.launch.uid)) >= 8
            box.sandbox.terminate()
            await asyncio.sleep(0.2)
            assert len(processes_of(box.launch.uid)) >= 8
            assert box.launch.group.kill()
            assert (await box.wait()).signal == signal.SIGKILL
            assert not any(is_alive(pid) for pid in processes_of(box.launch.uid))

    async def test_what_the_payload_left_ends_with_it(self, bench: Bench) -> None:
        """The payload exits; children of it that hold the output open do not keep its end from us."""
        script = (PROBES / "tree.py").read_text() + "os._exit(3)\n"
        async with bench.started(script) as box:
            assert await box.wait() == Exit(3, None)
            assert "ready" in box.text
            assert not any(is_alive(pid) for pid in processes_of(box.launch.uid))

    async def test_the_output_is_whole(self, bench: Bench) -> None:
        box, ended = await bench.run("for n in range(200000): print(n)")
        assert ended == Exit(0, None)
        assert box.text.split() == [str(n) for n in range(200_000)]

    async def test_close_without_start(self, bench: Bench) -> None:
        launch, output = bench.launch("print('ran')")
        launch.group.create(LIMITS)
        sandbox = await bench.provider.make(launch)
        await sandbox.check()
        assert await asyncio.to_thread(launch.group.kill)
        await sandbox.close()
        await sandbox.close()
        assert launch.group.remove()
        assert b"ran" not in output

    @pytest.mark.parametrize("how", ["the group", "its first process", "its last process"])
    async def test_killed_while_it_is_made(self, bench: Bench, how: str) -> None:
        """At random moments. Whatever was there is gone, nothing of the payload ran."""
        moments = random.Random(how)
        began = time.monotonic()
        async with bench.started(""):
            usual = time.monotonic() - began
        share = self.JOINED_SHARE if how == "its last process" else 1.0
        failed = rounds = 0
        while rounds < 14 or (not failed and rounds < ACCOUNTS // 2):
            rounds += 1
            launch, output = bench.launch("print('ran')")
            launch.group.create(LIMITS)
            before = children()
            making = asyncio.create_task(bench.provider.make(launch))
            while how == "its last process" and not launch.group.processes() and not making.done():
                await asyncio.sleep(0.001)  # its set-up begins when it joins the group
            await asyncio.sleep(moments.uniform(0, usual * share))
            for pid in _victims(how, launch, children() - before):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while how == "the group" and not making.done():  # as an attempt does that is stopped
                await asyncio.to_thread(launch.group.kill)
                await asyncio.wait({making}, timeout=0.02)
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    sandbox = await making
            except LaunchFailed:
                failed += 1
            else:
                await asyncio.to_thread(launch.group.kill)
                await sandbox.close()
            assert await asyncio.to_thread(launch.group.kill)
            assert await asyncio.to_thread(launch.group.remove)
            wait_for(lambda uid=launch.uid: processes_of(uid) == [], "no process left")  # type: ignore[misc]
            assert b"ran" not in output
        assert failed > 0

    # Launches that cannot be.

    async def test_no_such_executable(self, bench: Bench) -> None:
        box, ended = await bench.run(argv=("/opt/no-such-engine", "--flag"))
        assert ended != Exit(0, None)
        assert "/opt/no-such-engine" in box.text
        assert "No such file" in box.text

    async def test_not_executable(self, bench: Bench) -> None:
        box, ended = await bench.run(argv=("/etc/passwd",))
        assert ended != Exit(0, None)
        assert "Permission denied" in box.text

    @pytest.mark.parametrize("broken", ["missing", "empty", "a file"])
    async def test_broken_image(self, bench: Bench, broken: str) -> None:
        root = bench.directory / "root"
        if broken == "empty":
            root.mkdir()
        elif broken == "a file":
            root.touch()
        launch, output = bench.launch(image_root=root)
        launch.group.create(LIMITS)
        with pytest.raises(LaunchFailed, match=r"could not be made"):
            await bench.provider.make(launch)
        assert output.strip(), "the log has a reason"
        assert launch.group.kill()
        assert launch.group.remove()

    async def test_missing_input(self, bench: Bench) -> None:
        launch, output = bench.launch(inputs={"gone": bench.directory / "gone"})
        launch.group.create(LIMITS)
        with pytest.raises(LaunchFailed):
            await bench.provider.make(launch)
        assert b"No such file" in output
        assert launch.group.kill()
        assert launch.group.remove()

    async def test_an_input_that_became_a_link_is_not_followed(self, bench: Bench) -> None:
        link = bench.directory / "link"
        link.symlink_to("/etc/shadow")
        launch, _ = bench.launch(inputs={"link": link})
        launch.group.create(LIMITS)
        with pytest.raises(LaunchFailed):
            await bench.provider.make(launch)
        assert launch.group.kill()
        assert launch.group.remove()


def _victims(how: str, launch: Launch, made: set[int]) -> list[int]:
    if how == "its first process":
        return sorted(made)
    if how == "its last process":
        return sorted(launch.group.processes())[-1:]
    return []
