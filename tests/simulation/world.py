"""One seed: machines, controllers and people, an hour of faults in minutes, and then calm.

A seed is a pure function of its number and the code: the same number gives the same trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ficc import clock, failpoints
from ficc.controller import bootstrap
from ficc.controller.node_hub import local
from ficc.domain import ids
from ficc.executor import endpoint, ledger, pulse, questions, server
from ficc.executor import machine as executor_machine
from ficc.executor import main as executor_main
from ficc.executor import watchdog as watchdog_module
from ficc.gateway import relay
from ficc.settings import Settings
from simulation import controllers, sandboxes, watchdog
from simulation.controllers import EPOCH, Controller, Scaffold
from simulation.faults import Faults
from simulation.invariants import TICK_SECONDS, Invariants
from simulation.loop import PROCESS, Loop, Process, current
from simulation.machine import CAPACITY, Machine
from simulation.network import Network
from simulation.operator import Operator
from simulation.reads import REMEMBERED

QUIET_SECONDS_MAX = 600.0
"""Within which everything settles once nothing goes wrong any more."""
LOOK_SECONDS = 2.0
CALM_SHARE = 0.1
STEPS_MAX = 120_000


class Violation(Exception):
    """A promise was broken."""


@dataclass
class Result:
    seed: int
    steps: int = 0
    virtual_seconds: float = 0.0
    violation: str | None = None
    trace: list[str] = field(default_factory=list)
    passed: Counter[str] = field(default_factory=Counter)
    died_at: Counter[str] = field(default_factory=Counter)
    transitions: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)


class World:
    def __init__(self, seed: int, scaffold: Scaffold) -> None:
        self.seed = seed
        self.scaffold = scaffold
        scaffold.fresh()
        self.chance = random.Random(seed)
        self.loop = Loop(self.chance)
        self.loop.after_step = self._after_step
        self.loop.on_fault = lambda what: self.violated(f"nobody caught: {what}")
        self.loop.trace = self.trace  # type: ignore[method-assign]
        self.lines: list[str] = []
        self.broken: str | None = None
        self.faulty = True
        self.database_away = False
        self.database_flaky = False
        self.remembered: dict[Any, Any] = {}
        """What was read of the database since it was last written."""
        self.calm = self.chance.random() < CALM_SHARE
        """Whether nothing goes wrong in this seed: then every attempt ends because somebody wants it to."""
        self.bad_engines = 0.0 if self.calm else self.chance.choice((0.0, 0.2, 0.6))
        self.died_at: Counter[str] = Counter()
        self._ends: dict[asyncio.TimerHandle, Callable[[], None]] = {}
        self._stops: set[str] = set()
        self._tasks: list[asyncio.Task[Any]] = []
        self._asked: set[asyncio.Task[None]] = set()
        self.network = Network(self.loop)
        self.invariants = Invariants(self)
        self.network.on_frame = self.invariants.on_frame
        self.operator = Operator(self)
        self.machines: dict[str, Machine] = {}
        directory = scaffold.directory / "machines"
        for number in range(self.chance.choice((1, 1, 2, 3))):
            name = f"node-{number}"
            made = self.machines[name] = Machine(self, name, directory / name)
            made.directory.mkdir()
        self.network.machines = self.machines
        hosts = [Machine(self, f"host-{number}", directory) for number in range(2)]
        self.controllers = [
            Controller(self, f"controller-{number}", hosts[number])
            for number in range(self.chance.choice((1, 2) if self.calm else (1, 1, 2)))
        ]
        self.settings = _settings(scaffold, self.chance.choice((5, 6, 12, 30)))

    # What everything here uses.

    @property
    def content_directory(self) -> Path:
        return self.scaffold.content

    def new_id(self) -> str:
        return ids.make(int((EPOCH + self.loop.now) * 1000), self.chance.randbytes(ids.RANDOM_BYTES))

    def trace(self, line: str) -> None:
        self.lines.append(f"{self.loop.now:9.3f}  {line}")

    def violated(self, what: str) -> None:
        if self.broken is None:
            self.broken = what
            self.trace(f"VIOLATED: {what}")

    def later(self, seconds: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        """On nobody's behalf: what the world does by itself."""
        return self.loop.call_later(seconds, call, *args, context=_nobody())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(self.loop.create_task(work, context=_nobody()))

    def _ask(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work, context=_nobody())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    def until_calm(self, seconds: float, end: Callable[[], None]) -> None:
        """Call `end` after so long, or when the faults are over."""

        def run() -> None:
            self._ends.pop(handle, None)
            end()

        handle = self.later(seconds, run)
        self._ends[handle] = end

    def controller_of(self, process: Process) -> Controller:
        return next(one for one in self.controllers if one.name == process.name)

    def note_stopped(self, controller: Controller) -> None:
        self._stops.add(controller.name)

    def was_stopped(self, controller: Controller) -> bool:
        """Whether its process ever stood still, so that what it answers may be late."""
        return controller.name in self._stops

    def may_fault(self, error: BaseException | None) -> bool:
        """Whether an executor may give up over this: its watchdog is gone, as somebody killed or stopped it."""
        return type(error).__name__ == "WatchdogLost"

    def _after_step(self) -> None:
        self.invariants.after_step()
        if self.loop.steps > STEPS_MAX:
            self.violated(f"no rest within {STEPS_MAX} steps")
        if self.broken is not None:
            raise Violation(self.broken)

    # The course of a seed.

    def run(self) -> Result:
        result = Result(self.seed)
        with _installed(self):
            try:
                self.loop.run_until_complete(self.loop.create_task(self._course(result)))
            except Violation:
                result.violation = self.broken
            finally:
                self.invariants.close()
        result.steps, result.virtual_seconds = self.loop.steps, self.loop.now
        result.trace = self.lines
        result.passed.update(self.loop.passed)
        result.transitions.update({k: n for k, n in self.invariants.transitions.items() if n})
        return result

    async def _course(self, result: Result) -> None:
        for one in self.machines.values():
            one.start_executor()
        for controller in self.controllers:
            controller.start()
        self.spawn(self._supervise())
        self.spawn(self._tick())
        self.spawn(self._operate())
        self.spawn(self._request())
        faults = Faults(self)
        self.trace(
            f"{len(self.machines)} machines, {len(self.controllers)} controllers, leases of "
            f"{self.settings.leases.ttl_seconds} s, faults: {', '.join(kind.__name__ for kind in faults.kinds)}"
        )
        await asyncio.sleep(self.chance.choice((0.0, 2.0, 8.0)))
        rate = self.chance.choice((2.0, 6.0, 12.0))
        until = self.loop.now + self.chance.choice((6.0, 12.0, 30.0))
        while self.loop.now < until:
            await asyncio.sleep(self.chance.expovariate(1 / rate))
            if not self.calm:
                faults.strike()
        result.faults.update(faults.counts)
        self.faulty = False
        self.trace("no more faults")
        for handle, end in list(self._ends.items()):
            handle.cancel()
            end()
        self._ends.clear()
        for process in self._processes():
            process.armed = None
        while self._asked:
            await asyncio.wait(set(self._asked))
        await self._settle("everything settles", self._unsettled)
        for row in self.invariants.services.values():
            result.settled[row.state] += 1
        await self._stop_everything()
        await self._settle("everything stops", self._not_gone)

    def _processes(self) -> Iterator[Process]:
        found = [one.executor for one in self.machines.values()] + [one.process for one in self.controllers]
        return (process for process in found if process is not None)

    async def _supervise(self) -> None:
        """What ends is started again, as systemd would."""
        while True:
            await asyncio.sleep(
                self.chance.choice((0.2, 1.0)) if not self.faulty else self.chance.choice((0.2, 3.0, 12.0))
            )
            for one in (*self.machines.values(), *self.controllers):
                process = one.executor if isinstance(one, Machine) else one.process
                if process is not None and process.dead and (not self.faulty or self.chance.random() < 0.7):
                    one.start_executor() if isinstance(one, Machine) else one.start()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.invariants.tick()

    async def _operate(self) -> None:
        pause = self.chance.choice((1.5, 4.0, 10.0))
        while self.faulty:
            await asyncio.sleep(self.chance.expovariate(1 / pause))
            if self.faulty:
                self._ask(self.operator.act())

    async def _request(self) -> None:
        pause = self.chance.choice((1.0, 4.0, 100.0))
        while self.faulty:
            await asyncio.sleep(self.chance.expovariate(1 / pause))
            if self.faulty:
                self._ask(self.operator.request())

    # The end of a seed.

    async def _settle(self, what: str, look: Callable[[], str | None]) -> None:
        until = self.loop.now + QUIET_SECONDS_MAX
        while (why := look()) is not None:
            if self.loop.now > until:
                self.violated(f"not {what} within {QUIET_SECONDS_MAX:.0f} s: {why}")
            await asyncio.sleep(LOOK_SECONDS)

    def _unsettled(self) -> str | None:
        for row in self.invariants.services.values():
            if row.state not in ("ready", "degraded", "stopped", "failed"):
                return f"service {row.id} is {row.state}"
        return self._not_agreed()

    def _not_agreed(self) -> str | None:
        """Whether both sides hold the same attempts, and nothing else lives."""
        rows = self.invariants.rows
        here = {row.id for row in rows.values() if not row.released}
        there = set()
        for one in self.machines.values():
            if one.executor is None or one.executor.dead or one.running is None or one.listener is None:
                return f"{one.name} has no executor"
            there |= {entry.attempt_id for entry in one.running.ledger.holding()}
        alive = {engine.group.name for engine in self.invariants.alive}
        if not alive == here == there:
            return f"controllers hold {sorted(here)}, executors {sorted(there)}, and {sorted(alive)} live"
        for name in sorted(here):
            row = rows[name]
            if not row.ready and self.invariants.services[row.service_id].state != "degraded":
                return f"{name} is not ready"
        for controller in self.controllers:
            if not controller.up or controller.real is None:
                return f"{controller.name} is not up"
            live = controller.real.gateway.live
            if live:
                return f"{controller.name} has {live} requests that do not end"
            slots = controller.real.gateway.slots
            if any(slots.total(service_id) for service_id in self.invariants.services):
                return f"{controller.name} has slots that nobody holds"
        return None

    def _not_gone(self) -> str | None:
        states = {row.state for row in self.invariants.services.values()} - {"stopped", "failed"}
        if states:
            return f"services are {sorted(states)}"
        held = [row.id for row in self.invariants.rows.values() if not row.released]
        return f"{held} are not released" if held else self._not_agreed()

    async def _stop_everything(self) -> None:
        for row in list(self.invariants.services.values()):
            for _ in range(20):
                found = self.invariants.services.get(row.id)
                if found is None or found.state in ("stopping", "stopped"):
                    break
                with contextlib.suppress(Exception):
                    await self.operator.control(
                        self.operator.any_controller(), row.id, "stop", found.revision
                    )
                await asyncio.sleep(1.0)


def _settings(scaffold: Scaffold, ttl_seconds: int) -> Settings:
    key = str(scaffold.directory), ttl_seconds
    if key not in _made:
        _made[key] = Settings(
            state_directory=scaffold.directory,
            content={"reserve_bytes": 0},  # type: ignore[arg-type]
            leases={"ttl_seconds": ttl_seconds},  # type: ignore[arg-type]
            lifecycle={  # type: ignore[arg-type]
                "prepare_seconds": 20.0,
                "ready_seconds": 40.0,
                "restart_delay_seconds": 1,
                "restart_delay_seconds_max": 20,
                "restart_failures_max": 3,
                "restart_stable_seconds": 10,
            },
        )
    return _made[key]


_made: dict[tuple[str, int], Settings] = {}


def _nobody() -> Any:
    import contextvars

    made = contextvars.copy_context()
    made.run(PROCESS.set, None)
    return made


class _Loud(logging.Handler):
    """Whatever is logged as a fault of ours is one."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.trace(f"log: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.ERROR and error is not None and not self._world.may_fault(error):
            self._world.violated(f"{record.getMessage()}: {error!r}")


class _NoSources:
    """Nothing is acquired here."""

    async def close(self) -> None:
        pass


def _ordered(kind: type, made: dict[int, tuple[int, object]]) -> Callable[[], None]:
    """Let sets of these be walked in the order in which their members came; what undoes it."""
    before = kind.__hash__

    def number(one: object) -> int:
        return made.setdefault(id(one), (len(made), one))[0]

    kind.__hash__ = number  # type: ignore[method-assign,assignment]
    return lambda: setattr(kind, "__hash__", before)


@contextlib.contextmanager
def _installed(world: World) -> Iterator[None]:
    """Put the simulated in the place of the real, for as long as a seed runs."""
    undo: list[Callable[[], None]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    put(clock, "now_ns", lambda: current().machine.clock_ns())
    put(clock, "boot_id", lambda: current().machine.boot_id)
    put(failpoints, "on_pass", world.loop.pass_by)
    for timed in (endpoint, pulse, questions):
        put(timed, "time", SimpleNamespace(monotonic=world.loop.time))
    put(ledger, "new_id", world.new_id)
    put(executor_machine, "capacity", lambda *_: CAPACITY)
    put(executor_machine, "free", lambda *_: CAPACITY)
    put(executor_machine, "description", lambda: {"hostname": "simulated"})
    put(executor_main, "ImageStore", sandboxes.Images)
    put(watchdog_module, "sweep", watchdog.sweep_for_the_watchdog)
    for store, names in REMEMBERED:
        for name in names:
            put(store, name, world.scaffold.reads.remembering(getattr(store, name)))
    put(bootstrap, "management_app", lambda *_: None)
    put(bootstrap, "Https", lambda *_: _NoSources())
    put(bootstrap, "Database", lambda url: controllers.SimulatedDatabase(world))
    put(bootstrap, "Context", controllers.context)
    put(bootstrap, "LocalNode", controllers.Nodes)
    put(local, "LocalLink", controllers.link_to(world))
    made: dict[int, tuple[int, object]] = {}
    for kind in (endpoint.Exchange, server.Connection, relay.Invocation):
        undo.append(_ordered(kind, made))
    loud = _Loud(world)
    loggers = [logging.getLogger(name) for name in ("ficc.controller", "ficc.executor", "ficc.gateway")]
    for logger in loggers:
        logger.addHandler(loud)
        logger.propagate = False
    asyncio.set_event_loop(world.loop)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        for logger in loggers:
            logger.removeHandler(loud)
            logger.propagate = True
        for back in reversed(undo):
            back()
