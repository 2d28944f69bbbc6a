"""Between a controller and an executor's socket: a way that a test can cut, and answers that it can lose.

The executor's socket gets another name, and the relay listens under the old one. A cut is one as of a network: the
connections stay open, and nothing passes. Connections that come during a cut are taken and carry nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import Frame, Kind


class Relay:
    def __init__(self, path: Path, behind: Path) -> None:
        self._behind = behind
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o666)
        self._listener.listen(64)
        self._open: list[socket.socket] = []
        self._passing = threading.Event()
        self._passing.set()
        self._lose: str | None = None
        self._asked: dict[tuple[int, int], str] = {}
        self.calls: list[str] = []
        """The operations that were called, in order."""
        self.lost: list[str] = []
        """The operations whose answers were lost."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._passing.clear()

    def heal(self) -> None:
        """Let through what comes from now on; what was on its way when the cut came arrives late."""
        self._passing.set()

    def lose_answer_to(self, operation: str) -> None:
        """The next answer to this call does not arrive, and its connection breaks."""
        self._lose = operation

    def close(self) -> None:
        self._passing.set()
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(str(self._behind))
            except OSError:
                return
            self._open += [near, far]
            for source, target, name in ((near, far, "asks"), (far, near, "answers")):
                arguments = (source, target, id(near), name == "answers")
                threading.Thread(target=self._pump, args=arguments, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, connection: int, answers: bool) -> None:
        decoder = wire.Decoder()
        try:
            while data := source.recv(65536):
                self._passing.wait()
                for frame in decoder.feed(data):
                    self._note(frame, connection, answers)
                target.sendall(data)
        except (OSError, ConnectionAbortedError):
            pass
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _note(self, frame: Frame, connection: int, answers: bool) -> None:
        if frame.kind == Kind.CALL and not answers:
            operation = str(frame.json["op"])
            self.calls.append(operation)
            self._asked[connection, frame.stream] = operation
        elif frame.kind in (Kind.RESULT, Kind.FAILURE) and answers:
            operation = self._asked.pop((connection, frame.stream), "")
            if self._lose == operation:
                self._lose = None
                self.lost.append(operation)
                raise ConnectionAbortedError


@contextlib.contextmanager
def relayed(sock: Path) -> Iterator[Relay]:
    """In the way to an executor that listens at this path."""
    behind = sock.with_name("behind.sock")
    sock.rename(behind)
    relay = Relay(sock, behind)
    try:
        yield relay
    finally:
        relay.close()
        sock.unlink(missing_ok=True)
        behind.rename(sock)
