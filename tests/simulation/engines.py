"""Engines: processes that load, answer, hang, exit, or will not end."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

from ficc.domain.plan import Plan
from ficc.executor.providers.contract import Exit
from simulation.loop import Process

if TYPE_CHECKING:
    from simulation.groups import Group
    from simulation.world import World

PIDS_FROM = 1 << 23
"""Above every process id that the kernel gives."""


class Behaviour:
    """How an engine will act, drawn when it begins."""

    def __init__(self, world: World) -> None:
        chance = world.chance
        self.load_seconds = chance.choice((0.05, 0.5, 3.0, 15.0)) * chance.uniform(0.5, 1.5)
        self.polite_seconds = chance.choice((0.01, 0.3, 2.0))
        self.ignores_term = chance.random() < 0.15
        self.exits_after: float | None = None
        self.never_answers = False
        self.hangs_after: float | None = None
        self.listens_while_loading = chance.random() < 0.5
        if world.faulty and chance.random() < world.bad_engines:
            kind = chance.choice(("exits", "exits", "never", "hangs"))
            if kind == "exits":
                self.exits_after = chance.choice((0.0, 1.0, 10.0, 40.0)) * chance.uniform(0.5, 1.5)
            elif kind == "hangs":
                self.hangs_after = chance.uniform(0, 20)
            else:
                self.never_answers = True


class Engine:
    """The processes of one sandbox. A payload is there once `start` was called; before, its maker waits."""

    def __init__(self, group: Group, plan: Plan) -> None:
        self.group = group
        self.machine = group.machine
        self.world = group.machine.world
        self.plan = plan
        self.pid = PIDS_FROM + self.world.loop.serial()
        self.is_payload = False
        self.alive = True
        self.stuck_until = 0.0
        self.ended: asyncio.Future[Exit] = self.world.loop.create_future()
        self.open: list[EngineConnection] = []
        group.engines.append(self)

    def begin(self) -> None:
        self.is_payload = True
        self.behaviour = Behaviour(self.world)
        self.ready_at = self.world.loop.now + self.behaviour.load_seconds
        self.world.invariants.payload_started(self)
        if self.behaviour.exits_after is not None:
            self.world.later(self.behaviour.exits_after, self.exit_by_itself)

    def exit_by_itself(self) -> None:
        if self.alive:
            self.world.invariants.exited_by_itself(self)
            self.die(None, "")

    def die(self, number: int | None, by: str) -> None:
        if not self.alive:
            return
        if self.world.loop.now < self.stuck_until:  # uninterruptible: the signal waits
            self.world.later(self.stuck_until - self.world.loop.now, self.die, number, by)
            return
        self.alive = False
        self.group.engines.remove(self)
        self.ended.set_result(Exit(1, None) if number is None else Exit(None, number))
        self.world.invariants.process_ended(self, by)
        for connection in list(self.open):
            connection.engine_gone()

    def terminate(self) -> None:
        if self.alive and not self.behaviour.ignores_term:
            self.world.later(self.behaviour.polite_seconds, self.die, signal.SIGTERM, "term")

    # Requests.

    @property
    def listens(self) -> bool:
        loaded = self.world.loop.now >= self.ready_at and not self.behaviour.never_answers
        return self.alive and (loaded or self.behaviour.listens_while_loading)

    def accept(self, process: Process, protocol: Any) -> tuple[Any, Any]:
        connection = EngineConnection(self, process, protocol)
        protocol.connection_made(connection)
        if not self.alive:
            process.later(0, connection.engine_gone)
        return connection, protocol


class EngineConnection(asyncio.Transport):
    """One request to an engine, over HTTP as its executor speaks it."""

    def __init__(self, engine: Engine, process: Process, protocol: Any) -> None:
        super().__init__()
        self.engine, self.process, self.protocol = engine, process, protocol
        self.closed = False
        engine.open.append(self)

    def write(self, data: Any) -> None:
        world = self.engine.world
        _, _, body = bytes(data).partition(b"\r\n\r\n")
        world.later(world.network.latency(), self._asked, body)

    def _asked(self, body: bytes) -> None:
        engine, world = self.engine, self.engine.world
        if not engine.alive:
            return
        if (
            engine.behaviour.hangs_after is not None
            and world.loop.now > engine.ready_at + engine.behaviour.hangs_after
        ):
            return
        key = json.loads(body).get("user") if body else None  # without a body it is asked for a sign of life
        if key is not None:
            world.invariants.request_reached(engine, key)
        loading = world.loop.now < engine.ready_at or engine.behaviour.never_answers
        status, answer = (b"503 Busy", b'{"error":"loading"}') if loading else (b"200 OK", b'{"choices":[]}')
        seconds = 0.001 if loading or key is None else world.chance.choice((0.01, 0.5, 3.0, 3.0, 10.0, 40.0))
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
            status,
            len(answer),
        )
        world.later(seconds, self._answer, head + answer)

    def _answer(self, data: bytes) -> None:
        if self.engine.alive and not self.closed:
            self.process.later(self.engine.world.network.latency(), self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        if not self.closed:
            self.protocol.get_buffer(-1)[: len(data)] = data
            self.protocol.buffer_updated(len(data))

    def engine_gone(self) -> None:
        if self in self.engine.open:
            self.engine.open.remove(self)
        if not self.closed:
            self.closed = True
            self.process.later(0, self.protocol.connection_lost, None)

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            if self in self.engine.open:
                self.engine.open.remove(self)
            self.process.later(0, self.protocol.connection_lost, None)

    close = abort

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading
