"""`ficc up` as a process: alone on its state directory, and gone with everything it started however it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support.commands import BIN, Command, eventually

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `ficc up` on this test's directory, on a port of its own."""
    started: list[Command] = []

    def start(*words: str, **environment: str) -> Command:
        tmp_path.chmod(0o711)
        made = Command(
            [str(BIN / "ficc"), "up", *words],
            tmp_path / f"up-{len(started)}.log",
            {
                "FICC_STATE_DIRECTORY": str(tmp_path / "state"),
                "FICC_SERVER_LISTEN": "127.0.0.1:0",
                **environment,
            },
        )
        started.append(made)
        return made

    yield start
    for one in started:
        one.end()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ends_in_order_when_it_is_asked(up: Callable[..., Command], tmp_path: Path, number: int) -> None:
    command = up()
    eventually(lambda: "Console" in command.said, "it is up")
    family = command.family()
    assert len(family) >= 3
    command.process.send_signal(number)
    assert command.process.wait(60) == 0
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert not (tmp_path / "state" / "controller" / "address.json").exists()


def test_it_ends_with_whoever_holds_its_lifeline(up: Callable[..., Command]) -> None:
    command = up("--lifeline")
    eventually(lambda: "Console" in command.said, "it is up")
    family = command.family()
    assert command.process.stdin is not None
    command.process.stdin.write(b"still here\n")
    command.process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        command.process.wait(1)
    command.process.stdin.close()
    assert command.process.wait(60) == 0
    assert not psutil.wait_procs(family, timeout=20)[1]


def test_a_second_one_says_who_has_the_directory_and_touches_nothing(
    up: Callable[..., Command], tmp_path: Path
) -> None:
    first = up()
    eventually(lambda: "Console" in first.said, "it is up")
    address = (tmp_path / "state" / "controller" / "address.json").read_text()
    family = {process.pid for process in first.family()}
    second = up()
    assert second.process.wait(60) == 1
    expected = (
        f"ficc already runs on {tmp_path / 'state'} (pid {first.process.pid}); ficc open prints its console."
    )
    assert expected in second.said
    assert (tmp_path / "state" / "controller" / "address.json").read_text() == address
    assert {process.pid for process in first.family()} == family
    assert first.process.poll() is None


def test_one_that_was_killed_leaves_a_directory_that_can_be_taken_up(
    up: Callable[..., Command], tmp_path: Path
) -> None:
    first = up()
    eventually(lambda: "Console" in first.said, "it is up")
    family = first.family()
    for process in family:  # a power cut: nobody clears up
        process.kill()
    first.process.wait(60)
    psutil.wait_procs(family, timeout=20)
    assert (tmp_path / "state" / "controller" / "address.json").exists()
    second = up()
    eventually(lambda: "Console" in second.said, "it is up again")


def test_a_port_that_is_taken_says_how_to_choose_another(up: Callable[..., Command]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        command = up(FICC_SERVER_LISTEN=listen)
        assert command.process.wait(60) == 1
    assert f"cannot listen on {listen}" in command.said
    assert "FICC_SERVER_LISTEN" in command.said
    assert "Traceback" not in command.said


def test_one_that_nohup_started_does_not_mind_a_closed_terminal(tmp_path: Path) -> None:
    script = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    command = Command(
        [sys.executable, "-c", script, str(BIN / "ficc"), "up"],
        tmp_path / "up.log",
        {"FICC_STATE_DIRECTORY": str(tmp_path / "state"), "FICC_SERVER_LISTEN": "127.0.0.1:0"},
    )
    try:
        eventually(lambda: "Console" in command.said, "it is up")
        os.kill(command.process.pid, signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            command.process.wait(1)
    finally:
        command.end()
