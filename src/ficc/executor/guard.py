"""Leases and the watchdog, as the executor holds them.

Each live attempt has a lease; its deadline is here, on the event loop, and in the watchdog, which enforces
it when this process cannot. The watchdog is armed before anything of an attempt runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ficc import clock
from ficc.domain import lease
from ficc.domain.errors import Refused
from ficc.domain.lifecycle import IllegalTransition
from ficc.executor.cgroups import Group
from ficc.failpoints import failpoint

ANSWER_SECONDS = 5.0
START_SECONDS = 60.0
"""How long the watchdog may take to its first answer: a busy machine is slow to start an interpreter."""
ANSWER_BYTES_MAX = 4096
EXIT_SECONDS = 10.0


class WatchdogLost(Exception):
    """The watchdog is gone: nothing may run without it."""


class Watchdog:
    """The other end of the watchdog process."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        self._lock = asyncio.Lock()
        self._orders = 0
        self._lost = asyncio.Event()
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, directory: Path, lock: int) -> Watchdog:
        """Start it with its end of a socket and a copy of `lock`, which is held as long as it lives: the next
        executor waits for it before it judges what was left. It is there when this returns. Raises WatchdogLost."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        ours.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-m", "ficc.executor.watchdog", str(theirs.fileno()), str(directory)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lock),
                start_new_session=True,
            )
        watchdog = cls(process, ours)
        try:
            await watchdog._tell({"disarm": ""}, START_SECONDS)
        except BaseException:
            await asyncio.shield(watchdog.close())
            raise
        return watchdog

    async def _watch(self) -> None:
        await self._process.wait()
        self._lost.set()

    async def arm(self, attempt_id: str, group: Group, deadline_ns: int) -> None:
        groups = [str(directory) for directory in group.directories]
        await self._tell({"arm": attempt_id, "groups": groups, "deadline_ns": deadline_ns})

    async def set_deadline(self, attempt_id: str, deadline_ns: int) -> bool:
        """Whether it came before the earlier deadline: if not, the sandbox was ended."""
        return not await self._tell({"deadline": attempt_id, "deadline_ns": deadline_ns})

    async def disarm(self, attempt_id: str) -> None:
        await self._tell({"disarm": attempt_id})

    async def _tell(self, order: dict[str, object], seconds: float | None = None) -> bool:
        """One order and its answer. Raises WatchdogLost; `lost` is told too."""
        if self._lost.is_set():
            raise WatchdogLost("the watchdog is gone")
        loop = asyncio.get_running_loop()
        try:
            async with self._lock, asyncio.timeout(ANSWER_SECONDS if seconds is None else seconds):
                self._orders += 1
                number = self._orders
                await loop.sock_sendall(self._sock, json.dumps({**order, "n": number}).encode())
                while answer := await loop.sock_recv(self._sock, ANSWER_BYTES_MAX):
                    document = json.loads(answer)
                    if document["n"] == number:  # else it was for an order whose caller was cancelled
                        return bool(document["ended"])
                raise WatchdogLost("the watchdog closed its socket")
        except (OSError, TimeoutError, WatchdogLost) as error:
            self._lost.set()
            raise WatchdogLost(f"the watchdog did not answer: {error}") from error

    async def lost(self) -> None:
        """Until the watchdog ended by itself, or did not answer."""
        await self._lost.wait()

    async def close(self) -> None:
        """Let it end: it kills what is still armed first."""
        seconds = 0.0 if self._lost.is_set() else EXIT_SECONDS
        self._sock.close()
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await self._watching


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a watchdog wrote down of an attempt that it proved empty. `alive`: it killed what was there;
    otherwise nothing was left when it came to look."""

    why: str
    alive: bool


def verdicts(directory: Path) -> dict[str, Verdict | None]:
    """By attempt id. None: a crash cut the file short, and it says nothing."""
    found: dict[str, Verdict | None] = {}
    for path in directory.iterdir():
        found[path.name] = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            document = json.loads(path.read_text())
            found[path.name] = Verdict(str(document["why"]), bool(document["alive"]))
    return found


def forget_verdict(directory: Path, attempt_id: str) -> None:
    (directory / attempt_id).unlink(missing_ok=True)


class Leases:
    """The leases of live attempts. `on_lapse` is called on the event loop when one runs out."""

    def __init__(self, watchdog: Watchdog, on_lapse: Callable[[str], None]) -> None:
        self._watchdog = watchdog
        self._on_lapse = on_lapse
        self._leases: dict[str, lease.Lease] = {}
        self._renewals: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @staticmethod
    def check(renewal: lease.Renew) -> None:
        """Refuse a grant or renewal that no lease of this machine can have. Raises Refused."""
        if renewal.boot_id != clock.boot_id():
            raise Refused(
                "lease_refused", "The lease is of another boot of this machine; read the snapshot again."
            )
        if not lease.TTL_SECONDS_MIN <= renewal.ttl_seconds <= lease.TTL_SECONDS_MAX:
            raise Refused(
                "lease_refused", f"A lease lasts {lease.TTL_SECONDS_MIN} to {lease.TTL_SECONDS_MAX} seconds."
            )
        if renewal.sent_ns > clock.now_ns():
            raise Refused("lease_refused", "The lease was sent in the future of this machine's clock.")

    async def grant(self, attempt_id: str, group: Group, first: lease.Renew) -> None:
        """Begin a lease that was checked: this side's timer, and the watchdog. Raises WatchdogLost."""
        granted = lease.grant(first)
        self._hold(attempt_id, granted)
        await self._watchdog.arm(attempt_id, group, granted.deadline_ns)

    async def renew(self, attempt_id: str, renewal: lease.Renew) -> int:
        """The new deadline, CLOCK_BOOTTIME ns. Raises Refused `lease_refused` for a stale renewal or a lease
        that lapsed, WatchdogLost."""
        self.check(renewal)
        held = self._leases.get(attempt_id)
        if held is None:
            raise Refused("lease_refused", "The attempt holds no lease here; read its status.")
        if self.lapsed(attempt_id):
            raise _lapsed()
        try:
            after, _ = lease.advance(held, renewal)
        except (lease.StaleRenewal, IllegalTransition) as error:
            raise Refused("lease_refused", f"A stale renewal: {error}.") from error
        # Held before the first await: of two renewals at once the later sequence stands, here and there.
        self._hold(attempt_id, after)
        self._renewals[attempt_id] = self._renewals.get(attempt_id, 0) + 1
        failpoint("executor.renewal_held")
        if not await self._watchdog.set_deadline(attempt_id, after.deadline_ns):
            self._lapse(attempt_id)
            raise _lapsed()
        failpoint("executor.renewal_guarded")
        return after.deadline_ns

    def told(self, attempt_id: str) -> dict[str, int] | None:
        """What is said of a lease: its newest sequence, how often it was renewed here, and when it runs out on
        CLOCK_BOOTTIME. A sequence that rose by more than was renewed tells of renewals that did not arrive."""
        held = self._leases.get(attempt_id)
        if held is None:
            return None
        renewals = self._renewals.get(attempt_id, 0)
        return {"sequence": held.sequence, "renewals": renewals, "deadline_ns": held.deadline_ns}

    def lapsed(self, attempt_id: str) -> bool:
        """Whether the attempt's lease ran out, told of or not."""
        held = self._leases.get(attempt_id)
        return held is not None and (held.state is lease.State.LAPSED or lease.lapsed(held, clock.now_ns()))

    async def give_back(self, attempt_id: str) -> None:
        """End a lease once nothing of its attempt runs. A watchdog that is lost has nothing to be told."""
        self._leases.pop(attempt_id, None)
        self._renewals.pop(attempt_id, None)
        self._stop_timer(attempt_id)
        with contextlib.suppress(WatchdogLost):
            await self._watchdog.disarm(attempt_id)

    def _hold(self, attempt_id: str, held: lease.Lease) -> None:
        self._leases[attempt_id] = held
        self._set_timer(attempt_id, held.deadline_ns)

    def _stop_timer(self, attempt_id: str) -> None:
        timer = self._timers.pop(attempt_id, None)
        if timer is not None:
            timer.cancel()

    def _set_timer(self, attempt_id: str, deadline_ns: int) -> None:
        self._stop_timer(attempt_id)
        # The loop's clock stops in suspend, so the deadline is compared again when the timer fires.
        seconds = max(0.0, (deadline_ns - clock.now_ns()) / lease.SECOND)
        self._timers[attempt_id] = asyncio.get_running_loop().call_later(seconds, self._due, attempt_id)

    def _due(self, attempt_id: str) -> None:
        held = self._leases.get(attempt_id)
        if held is None:
            return
        if lease.lapsed(held, clock.now_ns()):
            self._lapse(attempt_id)
        else:
            self._set_timer(attempt_id, held.deadline_ns)

    def _lapse(self, attempt_id: str) -> None:
        held = self._leases.get(attempt_id)
        if held is not None and held.state is lease.State.HELD:
            self._leases[attempt_id], _ = lease.advance(held, lease.Lapse())
            failpoint("executor.lapsed")
            self._on_lapse(attempt_id)


def _lapsed() -> Refused:
    return Refused("lease_refused", "The lease lapsed; its sandbox is being ended.")
