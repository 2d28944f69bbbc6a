"""The watchdog: one small process per executor that ends sandboxes when the executor cannot.

Every attempt is armed here with its control groups and the moment its lease runs out, on CLOCK_BOOTTIME. When
that moment comes, the groups are killed; when the executor's end of the socket closes, everything armed is. This
needs nothing of the executor, which may be hung or gone. What was proved empty is written down, one durable file
per attempt, so that the next executor knows how the attempt ended. An attempt that was due stays in this process's
care until the executor disarms it: whatever still joins its groups is killed too.

Nothing here waits for one sandbox while another is due, and no fault of the disk keeps it from killing.

Run as `python -I -m ficc.executor.watchdog FD DIRECTORY`. Messages are JSON packets on a SOCK_SEQPACKET
socket: {"arm": id, "groups": [...], "deadline_ns": n}, {"deadline": id, "deadline_ns": n}, {"disarm": id},
each with a number "n" and answered {"n": n, "ended": whether its deadline came first}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ficc import clock
from ficc.domain.lease import SECOND
from ficc.executor.cgroups import sweep

MESSAGE_BYTES_MAX = 32 << 10
RETRY_SECONDS = 0.02
"""How soon a sandbox that is not empty yet is killed again."""
WATCH_SECONDS = 1.0
"""How often a sandbox that was ended is looked at again until it is disarmed."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_TFD_TIMER_ABSTIME = 1


@dataclass(slots=True)
class Armed:
    """`due_ns` is the deadline and, once that has passed, when to look again. `why` is set by then;
    `alive` says that a process was there to be killed, `empty` that none is left."""

    groups: list[Path]
    due_ns: int
    why: str = ""
    alive: bool = False
    empty: bool = False


class Watchdog:
    def __init__(self, sock: socket.socket, directory: Path) -> None:
        self.sock = sock
        self.directory = directory
        self.armed: dict[str, Armed] = {}
        self.timer = _LIBC.timerfd_create(time.CLOCK_BOOTTIME, os.O_CLOEXEC)
        if self.timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def run(self) -> None:
        """Until the executor's end closes; then everything armed is ended."""
        while True:
            readable, _, _ = select.select([self.sock, self.timer], [], [])
            if self.timer in readable:
                os.read(self.timer, 8)
            # An order that is here counts before the clock: it may be a renewal.
            if self.sock in readable and not self._receive():
                break
            now = clock.now_ns()
            for attempt_id, armed in self.armed.items():
                if armed.due_ns <= now:
                    self._end(attempt_id, armed, "lease_lapsed", now)
            self._set_timer()
        while not all(armed.empty for armed in self.armed.values()):
            for attempt_id, armed in self.armed.items():
                self._end(attempt_id, armed, "executor_gone", 0)
            time.sleep(RETRY_SECONDS)

    def _receive(self) -> bool:
        """Carry out one order; whether the executor is still there."""
        try:
            message = self.sock.recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:
            return False
        if not message:
            return False
        order = json.loads(message)
        try:
            self.sock.send(json.dumps({"n": order["n"], "ended": self._obey(order)}).encode())
        except BrokenPipeError:
            return False
        return True

    def _obey(self, order: dict[str, Any]) -> bool:
        if "arm" in order:
            self.armed[order["arm"]] = Armed([Path(group) for group in order["groups"]], order["deadline_ns"])
            return False
        if "disarm" in order:
            self.armed.pop(order["disarm"], None)
            return False
        armed = self.armed.get(order["deadline"])
        if armed is None or armed.why:
            return True
        armed.due_ns = order["deadline_ns"]
        return False

    def _end(self, attempt_id: str, armed: Armed, why: str, now_ns: int) -> None:
        """Kill once, and write down the first time that nothing is left."""
        armed.why = armed.why or why
        found = sweep(armed.groups)
        armed.alive = armed.alive or (found and not armed.empty)
        if not found and not armed.empty:
            armed.empty = True
            self._write_down(attempt_id, armed)
        armed.due_ns = now_ns + int((RETRY_SECONDS if found else WATCH_SECONDS) * SECOND)

    def _write_down(self, attempt_id: str, armed: Armed) -> None:
        """Durably: the file, then its name. A disk that refuses costs the knowledge, nothing else."""
        document = {"why": armed.why, "alive": armed.alive, "at_ns": clock.now_ns()}
        try:
            with open(self.directory / attempt_id, "w") as file:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                print(f"watchdog: {attempt_id}: {armed.why}, not written down: {error}", file=sys.stderr)

    def _set_timer(self) -> None:
        """To what is due next, or off. A time that is past already fires at once."""
        nearest = max(1, min(armed.due_ns for armed in self.armed.values())) if self.armed else 0
        value = struct.pack("qqqq", 0, 0, *divmod(nearest, SECOND))
        if _LIBC.timerfd_settime(self.timer, _TFD_TIMER_ABSTIME, ctypes.c_char_p(value), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")


def main() -> None:
    # Signals meant for the executor's process group are not meant for what outlives it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Watchdog(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])).run()


if __name__ == "__main__":
    main()
