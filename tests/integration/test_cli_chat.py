"""`ficc chat` on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.installation import Installation

pytestmark = pytest.mark.timeout(240)

FICC = str(Path(sys.executable).parent / "ficc")
ALIAS = "talker"
LONG = "Write a very long story about the sea, with many chapters."


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory, images: Path) -> Iterator[Installation]:
    """One whose controller says all that it has to say."""
    directory = tmp_path_factory.mktemp("chat")
    with Installation(directory, images=images, settings={"FICC_LOG_LEVEL": "debug"}) as made:
        yield made


@pytest.fixture(scope="module")
def service(installation: Installation, model_file: Path) -> str:
    model = installation.add_model(model_file, "smollm2")
    made = installation.call(
        "POST", "/inference", installation.specification(ALIAS, model["id"], context=2048)
    )
    installation.settled(made["id"], "ready")
    return str(made["id"])


class Terminal:
    """A command on a terminal of its own, with its keys and its screen."""

    def __init__(self, *words: str, directory: Path) -> None:
        self.screen = ""
        self.fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [FICC, *words],
            env={**os.environ, "FICC_STATE_DIRECTORY": str(directory), "TERM": "dumb", "NO_COLOR": "1"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def shows(self, text: str, since: int = 0, seconds: float = 60.0) -> int:
        """Where the screen's text goes on behind this, once it is there."""
        until = time.monotonic() + seconds
        while (at := self.screen.find(text, since)) < 0:
            assert time.monotonic() < until, f"{text!r} is not in {self.screen[since:]!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert text in self.screen[since:], self.screen
        return at + len(text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal(installation: Installation, service: str) -> Iterator[Terminal]:
    made = Terminal("chat", ALIAS, directory=installation.directory)
    yield made
    made.close()


def in_flight(installation: Installation, service_id: str) -> int:
    replicas = installation.call("GET", f"/inference/{service_id}")["replicas"]
    return sum(replica["in_flight"] for replica in replicas)


def test_ctrl_c_stops_the_answer_and_gives_the_prompt_back(
    terminal: Terminal, installation: Installation, service: str
) -> None:
    at = terminal.shows("> ")
    terminal.type(LONG + "\n")
    at = terminal.shows("sea, with many chapters.\r\n", at)  # the terminal's echo
    terminal.shows(" ", at + 20)  # and some of the answer
    assert in_flight(installation, service) == 1
    terminal.type("\x03")
    at = terminal.shows("Stopped.", at)
    at = terminal.shows("> ", at)
    installation.until(lambda: in_flight(installation, service) == 0, "its slot is free")
    terminal.type("And now?\n")  # it goes on
    at = terminal.shows("And now?\r\n", at)
    installation.until(lambda: in_flight(installation, service) == 1, "the next is answered")
    terminal.type("\x03")
    at = terminal.shows("> ", at)
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0
    assert "Traceback" not in terminal.screen

    # A client that leaves is no fault, and is not logged as one.
    log = installation.logs["controller"].read_text()
    gone = [line for line in log.splitlines() if "ended: client_gone" in line]
    assert len(gone) == 2
    assert all("debug" in line for line in gone)
    assert "peer_lost" not in log


def test_ctrl_c_at_the_prompt_ends_with_130(terminal: Terminal) -> None:
    terminal.shows("> ")
    terminal.type("\x03")
    assert terminal.process.wait(30) == 130


def test_a_closed_terminal_ends_it(terminal: Terminal, installation: Installation, service: str) -> None:
    terminal.shows("> ")
    terminal.type(LONG + "\n")
    installation.until(lambda: in_flight(installation, service) == 1, "it answers")
    terminal.process.send_signal(signal.SIGHUP)
    assert terminal.process.wait(30) == 129
    installation.until(lambda: in_flight(installation, service) == 0, "its slot is free")
