"""Endpoints over TCP: the engine listens on the loopback interface of its sandbox's own network, and nothing that
listens anywhere else is ever reached in its place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from ficc.executor.providers import namespace_connect
from ficc.executor.providers.namespace_connect import NamespaceConnector
from support.executor import (
    PATIENCE_SECONDS,
    ExecutorProcess,
    Session,
    connected,
    is_alive,
    wait_for,
    whole,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

PORT = 11434
STRANGER = 12345


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as executor:
        yield executor


@pytest.fixture
async def session(executor: ExecutorProcess) -> AsyncIterator[Session]:
    async with connected(executor) as session:
        yield session


def helpers(executor: ExecutorProcess) -> list[int]:
    """The processes that make an executor's sockets."""
    children = Path(f"/proc/{executor.pid}/task/{executor.pid}/children").read_text().split()
    return [int(p) for p in children if b"namespace_connect" in Path(f"/proc/{p}/cmdline").read_bytes()]


async def end(session: Session, fence: Fence) -> None:
    await session.stop(fence, 0)
    await session.until(fence, "released")


async def test_answers_streams_and_backpressure(session: Session) -> None:
    fence = await session.serving(session.replica(port=PORT))
    answer = await session.ask(fence, do="json", text="ä")
    assert json.loads(answer.body)["echo"]["text"] == "ä"
    assert len((await session.ask(fence, do="length", bytes=5_000_000)).body) == 5_000_000
    together = await asyncio.gather(
        *(session.ask(fence, do="events", count=3, pause=0.01) for _ in range(60))
    )
    assert {one.body for one in together} == {b"data: 0\n\ndata: 1\n\ndata: 2\n\n"}
    unread = await session.open(fence, do="pour", key="k", bytes=64 << 20)
    assert (await session.ask(fence, do="json")).status == 200
    unread.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "closed" not in await session.report(fence, "k"):
            await asyncio.sleep(0.01)
    await end(session, fence)


async def test_two_sandboxes_have_the_same_port_to_themselves(session: Session) -> None:
    one, other = [await session.serving(session.replica(port=PORT)) for _ in range(2)]
    stream = await session.open(one, do="hang", key="of one")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await session.report(one, "of one"):
            await asyncio.sleep(0.01)
    assert await session.report(other, "of one") == {}
    stream.close()
    await end(session, one)
    assert (await session.ask(other, do="json")).status == 200
    await end(session, other)


async def test_a_port_of_the_machine_is_not_the_sandboxes(session: Session) -> None:
    """The engine listens on a unix socket, its contract names a port, and the machine listens there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        plan = session.replica(port=port)
        silent = session.plan("import time; time.sleep(600)", endpoint=plan.endpoint)
        fence = await session.run(silent)
        await session.until(fence, "running")
        for _ in range(5):
            with pytest.raises(Refused, match=r"service_not_ready: .*refused"):
                await session.open(fence, do="json")
        with pytest.raises(BlockingIOError):
            listener.accept()
        await end(session, fence)


async def test_an_engine_that_does_not_accept_over_tcp(session: Session) -> None:
    """Its backlog fills; nobody else waits for it."""
    fence = await session.run(session.replica("deaf", port=PORT))
    await session.until(fence, "running")
    while "listening" not in await session.output(fence):
        await asyncio.sleep(0.01)
    other = await session.serving(session.replica(port=PORT))
    waiting, refused = [], None
    while refused is None and len(waiting) < 20:
        opening = asyncio.create_task(session.open(fence, 1.0, do="json"))
        assert (await session.ask(other, do="json")).status == 200
        try:
            waiting.append(await opening)
        except Refused as error:
            refused = error
    assert refused is not None
    assert refused.code == "service_not_ready"
    for stream in waiting:
        with pytest.raises(Refused, match="deadline_exceeded"):
            await whole(stream)
    await end(session, fence)
    await end(session, other)


async def test_the_helper_has_no_rights_and_no_view_of_the_machines_network(
    session: Session, executor: ExecutorProcess
) -> None:
    fence = await session.serving(session.replica(port=PORT))
    (helper,) = helpers(executor)
    lines = Path(f"/proc/{helper}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert {status[name] for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {"0" * 16}
    assert set(status["Uid"].split()) == {"65534"}
    assert (status["NoNewPrivs"], status["Groups"].strip()) == ("1", "")
    assert os.readlink(f"/proc/{helper}/ns/net") != os.readlink("/proc/self/ns/net")
    open_files = [os.readlink(path) for path in Path(f"/proc/{helper}/fd").iterdir()]
    assert len([path for path in open_files if path.startswith("socket:")]) == 1
    assert not [path for path in open_files if path.startswith("net:")]
    await end(session, fence)
    assert not is_alive(helper)
    plain = await session.serving(session.replica())
    assert helpers(executor) == []  # a unix endpoint needs none
    await end(session, plain)


def test_the_helper_ends_with_a_killed_executor() -> None:
    with ExecutorProcess.on_new_directory() as executor:

        async def begin() -> Fence:
            async with connected(executor) as session:
                return await session.serving(session.replica(port=PORT))

        asyncio.run(begin())
        (helper,) = helpers(executor)
        executor.kill()
        wait_for(lambda: not is_alive(helper), "the helper ended")
        executor.start()


# The connector alone, with a namespace that the test makes.


@contextlib.contextmanager
def namespace(script: str, *options: str) -> Iterator[int]:
    """A process in a network of its own, once its script said a line."""
    process = subprocess.Popen(
        ["unshare", "--net", *options, "/usr/bin/python3", "-c", "import socket, sys, time\n" + script],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


UP = "import subprocess; subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n"
READY = "print('ready', flush=True); time.sleep(600)\n"


async def test_a_port_is_not_connected_to_itself() -> None:
    """With few local ports TCP takes the port that is asked for as its own, and connects it to itself."""
    ports = "open('/proc/sys/net/ipv4/ip_local_port_range', 'w').write('40000 40001')\n"
    with namespace(UP + ports + READY) as pid:
        connector = await NamespaceConnector.enter(pid)
        for _ in range(20):
            for port in (40000, 40001):
                with pytest.raises(ConnectionRefusedError):
                    connector.connect(port)
        await connector.close()


async def test_a_namespace_that_is_ours_is_refused() -> None:
    with pytest.raises(OSError, match="no network namespace of its own"):
        await NamespaceConnector.enter(os.getpid())


async def test_a_helper_that_is_gone_is_said() -> None:
    with namespace(UP + READY) as pid:
        connector = await NamespaceConnector.enter(pid)
        connector._process.kill()
        await connector._process.wait()
        for _ in range(namespace_connect.STOCK + 2):  # what was made in advance leads nowhere either
            with pytest.raises(OSError):
                connector.connect(PORT)
        await connector.close()
        await connector.close()


AS_STRANGER = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
import namespace_connect
async def main():
    connector = await namespace_connect.NamespaceConnector.enter(int(sys.argv[2]))
    connection = connector.connect(11434)
    connection.setblocking(True)
    print(connection.recv(5).decode())
    for line in open(f"/proc/{connector._process.pid}/status"):
        if line.startswith("CapEff"):
            print(line.split()[1])
    await connector.close()
asyncio.run(main())
"""


def test_without_root_the_way_leads_through_the_sandboxes_user_namespace() -> None:
    listening = UP + (
        "s = socket.create_server(('127.0.0.1', 11434))\n"
        "print('ready', flush=True)\n"
        "c, _ = s.accept(); c.sendall(b'hello'); time.sleep(600)\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        shutil.copy(namespace_connect.__file__, directory)
        unprivileged = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
        made = subprocess.Popen(
            [
                *(*unprivileged, "unshare", "--user", "--map-root-user", "--net"),
                *("/usr/bin/python3", "-c", "import socket, sys, time\n" + listening),
            ],
            stdout=subprocess.PIPE,
        )
        assert made.stdout is not None
        try:
            assert made.stdout.readline() == b"ready\n"
            python = "/usr/bin/python3" if not _readable_to_all(sys.executable) else sys.executable
            said = subprocess.run(
                [*unprivileged, python, "-B", "-c", AS_STRANGER, directory, str(made.pid)],
                capture_output=True,
                timeout=PATIENCE_SECONDS,
                text=True,
            )
        finally:
            made.kill()
            made.wait()
            made.stdout.close()
    assert said.stdout.split() == ["hello", "0" * 16], said.stderr


def _readable_to_all(path: str) -> bool:
    real = Path(path).resolve()
    return all(parent.stat().st_mode & 0o001 for parent in (real, *real.parents))


async def test_a_connection_costs_no_turn_of_the_helper() -> None:
    """Sockets are made in advance: with the helper stopped, as many connections as are in stock still succeed."""
    listening = UP + "s = socket.create_server(('127.0.0.1', 11434), backlog=64)\n" + READY
    with namespace(listening) as pid:
        connector = await NamespaceConnector.enter(pid)
        connector.connect(PORT).close()
        await asyncio.sleep(0.2)  # it has made what was asked for
        os.kill(connector._process.pid, 19)
        for _ in range(namespace_connect.STOCK):
            connector.connect(PORT).close()
        with pytest.raises(OSError, match="does not answer"):
            connector.connect(PORT)
        os.kill(connector._process.pid, 18)
        connector.connect(PORT).close()
        await connector.close()
