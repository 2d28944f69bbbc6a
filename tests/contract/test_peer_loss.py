"""A peer that goes away ends its requests, once and for all.

The controller reaches its executor through a socket of the test's, so that the connection can break while both live.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.background import Background, background
from contract.scripted import Open, ScriptedInstallation

pytestmark = pytest.mark.timeout(240)


class Between:
    """Passes bytes on between a listening socket and another one, until it drops every connection it has. Before that
    it can keep back what is answered over those that carry invocations."""

    def __init__(self, loop: Background, path: Path, target: Path) -> None:
        self._loop = loop
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._endpoints: set[asyncio.StreamWriter] = set()
        self._keeping_back = False
        self._server = loop.run(asyncio.start_unix_server(self._connected, path))
        path.chmod(0o666)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        hello = await reader.read(65536)
        if b'"endpoint"' in hello:  # the role of the connection
            self._endpoints.add(writer)
        far_writer.write(hello)
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= {writer, far_writer}
        self._endpoints.discard(writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not (self._keeping_back and writer in self._endpoints):
                    writer.write(data)
                    await writer.drain()
        writer.close()

    def keep_back_answers(self) -> None:
        self._keeping_back = True

    def drop(self) -> None:
        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()
            self._keeping_back = False

        self._loop.call(abort)

    def close(self) -> None:
        self._loop.call(self._server.close)
        self.drop()


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedInstallation, Between]]:
    made = ScriptedInstallation(tmp_path_factory.mktemp("through"))
    with background() as loop:
        try:
            made.start("executor")
            path = made.directory / "run" / "between.sock"
            between = Between(loop, path, made.executor_socket)
            made.environment["FICC_EXECUTOR_SOCKET"] = str(path)
            made.start("controller")
            yield made, between
            between.close()
        finally:
            made.stop()


@pytest.fixture
def between(through: tuple[ScriptedInstallation, Between]) -> Between:
    return through[1]


@pytest.fixture
def installation(
    through: tuple[ScriptedInstallation, Between], service: dict[str, Any]
) -> ScriptedInstallation:
    """Connected, and its service answers."""
    made = through[0]
    made.until(lambda: made.chat(service["id"]).status == 200, "the service answers")
    return made


@pytest.fixture(scope="module")
def service(through: tuple[ScriptedInstallation, Between]) -> dict[str, Any]:
    """Two replicas, so that a request could be sent to another one."""
    return through[0].service("lossy", replicas=2)


def begun(installation: ScriptedInstallation, service: dict[str, Any], key: str) -> None:
    installation.until(lambda: installation.times(service["id"], key) == 1, "an engine has the request")


def attempts(installation: ScriptedInstallation, service: dict[str, Any]) -> list[str]:
    return [replica["attempt_id"] for replica in installation.record(service["id"])["replicas"]]


def seen_once(installation: ScriptedInstallation, service: dict[str, Any], key: str) -> None:
    """By the logs of both engines, now and after a while in which it could have been sent again."""
    installation.until(lambda: installation.chat(service["id"]).status == 200, "the service answers again")
    assert installation.times(service["id"], key) == 1
    time.sleep(1.0)
    assert installation.times(service["id"], key) == 1


# Loss.


@pytest.mark.contract("C-X8")
def test_a_lost_connection_to_the_executor_ends_a_request_that_is_not_sent_again(
    installation: ScriptedInstallation, between: Between, service: dict[str, Any]
) -> None:
    before = attempts(installation, service)
    waiting = Open(installation, service["id"], do="hang", key="lost")
    begun(installation, service, "lost")
    between.drop()
    answer = waiting.answer()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (502, "peer_lost")
    assert answer.headers["x-should-retry"] == "false"
    seen_once(installation, service, "lost")
    assert attempts(installation, service) == before  # and the engines went on


@pytest.mark.contract("C-X8")
def test_nor_is_it_sent_again_if_nobody_knows_whether_an_engine_has_it(
    installation: ScriptedInstallation, between: Between, service: dict[str, Any]
) -> None:
    """The engine has it, but the answer that says so is lost with the connection."""
    between.keep_back_answers()
    waiting = Open(installation, service["id"], do="hang", key="not confirmed")
    begun(installation, service, "not confirmed")
    between.drop()
    answer = waiting.answer()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (502, "peer_lost")
    seen_once(installation, service, "not confirmed")


@pytest.mark.contract("C-X8")
def test_a_lost_connection_ends_a_stream_and_says_so_in_it(
    installation: ScriptedInstallation, between: Between, service: dict[str, Any]
) -> None:
    stream = Open(installation, service["id"], do="hang", key="lost in stream", stream=True)
    answer = stream.answer()
    first = answer.readline()
    assert first.startswith(b"data: {")
    between.drop()
    rest = answer.read().decode().strip().split("\n\n")
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "peer_lost"
    assert "[DONE]" not in "".join(rest)
    assert '"finish_reason": "stop"' not in "".join(rest)
    seen_once(installation, service, "lost in stream")


@pytest.mark.contract("C-X8")
def test_a_client_that_leaves_ends_its_request_at_the_engine(
    installation: ScriptedInstallation, service: dict[str, Any]
) -> None:
    leaving = Open(installation, service["id"], do="hang", key="left")
    begun(installation, service, "left")
    leaving.close()
    installation.until(lambda: ended(installation, service, "left"), "the engine's connection is closed")
    seen_once(installation, service, "left")


@pytest.mark.contract("C-X8")
def test_a_lost_controller_ends_its_requests_at_the_engine(
    installation: ScriptedInstallation, service: dict[str, Any]
) -> None:
    before = attempts(installation, service)
    waiting = Open(installation, service["id"], do="hang", key="killed")
    begun(installation, service, "killed")
    installation.kill("controller", signal.SIGKILL)
    with pytest.raises((http.client.HTTPException, OSError)):
        waiting.answer()
    installation.start("controller")
    seen_once(installation, service, "killed")
    assert attempts(installation, service) == before
    installation.until(lambda: ended(installation, service, "killed"), "the engine's connection is closed")


def ended(installation: ScriptedInstallation, service: dict[str, Any], key: str) -> bool:
    """Whether the engine that had the request saw its end. Either replica may answer, so ask a few times."""
    return any(installation.seen(service["id"], key)["closed"] for _ in range(4))
