"""A deterministic event loop: virtual time, inline threads, and processes that can be killed or stopped.

Every callback belongs to the process in whose context it was scheduled. A killed process never runs again, not even
its `finally`: exactly what SIGKILL leaves. A stopped process runs what came meanwhile once it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ficc import failpoints

if TYPE_CHECKING:
    from simulation.machine import Machine
    from simulation.network import Network

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
THREAD_SECONDS = (0.0002, 0.004)
"""How long work in a thread takes to begin."""


class Crash(BaseException):
    """The simulated process died here. Nothing catches it, and nothing of the process runs after it."""


class Stuck(Exception):
    """Nothing is scheduled any more."""


class Process:
    """A simulated operating system process. `armed`: the failpoint at which it dies, and at which pass."""

    def __init__(self, loop: Loop, machine: Machine, name: str) -> None:
        self.loop = loop
        self.machine = machine
        self.name = name
        self.dead = False
        self.stopped = False
        self.armed: tuple[str, int] | None = None
        self.on_death: list[Callable[[], None]] = []
        self.parked: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self.ended = loop.create_future()

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        return self.loop.create_task(work, context=self.context.copy())

    def later(self, seconds: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, call, *args, context=self.context.copy())

    def kill(self) -> None:
        if self.dead:
            return
        self.dead = True
        self.loop.graveyard.extend(self.parked)
        self.parked.clear()
        for call in self.on_death:
            call()
        if not self.ended.done():
            self.ended.set_result(None)

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        for handle in self.parked:
            self.loop._ready.append(handle)  # type: ignore[attr-defined]
        self.parked.clear()


def current() -> Process:
    """The process that runs. Raises Crash for one that died in the middle of a step."""
    process = PROCESS.get()
    assert process is not None
    if process.dead:
        raise Crash
    return process


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """Sets of tasks are walked in the order of their making."""

    def __init__(self, *args: Any, loop: Loop, **named: Any) -> None:
        self._serial = loop.serial()
        super().__init__(*args, loop=loop, **named)

    def __hash__(self) -> int:
        return self._serial


class _Future(asyncio.Future):  # type: ignore[type-arg]
    def __init__(self, *, loop: Loop) -> None:
        self._serial = loop.serial()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._serial


class Loop(asyncio.BaseEventLoop):
    """`after_step` is called after every callback; `on_fault` is told of exceptions that nobody caught."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.chance = chance
        self.network: Network | None = None
        self.graveyard: list[object] = []
        """What is left of dead processes. Kept, so that none of it is collected and its `finally` runs."""
        self.after_step: Callable[[], None] = lambda: None
        self.on_fault: Callable[[str], None] = lambda _: None
        self.passed: dict[str, int] = {}
        self._serials = 0
        self.set_task_factory(lambda loop, work, **named: _Task(work, loop=loop, **named))  # type: ignore[arg-type]
        self.set_exception_handler(self._uncaught)
        self.slow_callback_duration = 1e9

    def serial(self) -> int:
        self._serials += 1
        return self._serials

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if not scheduled:
                raise Stuck
            self.now = max(self.now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self.now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)
            if process is not None:
                if process.dead:
                    self.graveyard.append(handle)
                    continue
                if process.stopped:
                    process.parked.append(handle)
                    continue
            self.steps += 1
            handle._run()
            if process is not None and process.dead:
                self.graveyard.append(handle)
            self.after_step()

    def _write_to_self(self) -> None:
        pass

    def _uncaught(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, Crash):
            self.on_fault(f"{context['message']}: {error!r}")

    # Threads, whose work runs in one piece.

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        self.call_later(self.chance.uniform(*THREAD_SECONDS), self._in_thread, future, func, args)
        return future

    def _in_thread(
        self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        if future.cancelled():
            return
        try:
            result = func(*args)
        except Crash:
            raise
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    # Sockets.

    async def create_unix_connection(self, factory: Any, path: Any = None, **_: Any) -> Any:
        assert self.network is not None
        return await self.network.connect(current(), str(path), factory)

    async def create_connection(self, factory: Any, *_: Any, sock: Any = None, **named: Any) -> Any:
        assert self.network is not None
        return self.network.connect_engine(sock, factory)

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        sock.send(bytes(data))

    async def sock_recv(self, sock: Any, count: int) -> Any:
        return await sock.receive()

    # Failpoints.

    def pass_by(self, name: str) -> None:
        process = PROCESS.get()
        if process is None:
            return
        if process.dead:
            raise Crash
        self.passed[name] = self.passed.get(name, 0) + 1
        if process.armed is not None and process.armed[0] == name:
            left = process.armed[1] - 1
            process.armed = (name, left)
            if left <= 0:
                self.trace(f"{process.name} dies at {name}")
                process.kill()
                raise Crash

    def trace(self, line: str) -> None:
        """Replaced by the world's."""

    def install(self) -> None:
        failpoints.on_pass = self.pass_by
