"""What must hold after every step, whatever was lost, late, doubled, killed or stopped."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ficc.domain import attempt, placement, service
from ficc.domain.attempt import LIVE, Outcome, State
from ficc.domain.lease import SECOND, STOP_BUDGET_SECONDS
from ficc.domain.plan import COUNTED, Limits
from ficc.executor.main import Executor
from ficc.protocol.executor_wire import HEADER, Kind
from simulation.engines import Engine
from simulation.machine import CAPACITY, Machine

if TYPE_CHECKING:
    from simulation.loop import Process
    from simulation.network import End
    from simulation.world import World

ROUTE_SECONDS = 6.0
"""How long a route may outlive what it leads to in the database: until the next refresh, and its reading."""
SILENT_SECONDS = 20.0
"""And how long what its executor ended, unheard: until its silence is noticed, and a refresh."""
TICK_SECONDS = 0.5

_ORDER = {state: place for place, state in enumerate(State)}


@dataclass(frozen=True, slots=True)
class Row:
    """An attempt as the controllers have it."""

    id: str
    service_id: str
    workload_id: str
    replica: int
    number: int
    node_id: str
    generation: int
    record: attempt.Record
    released: bool
    ready: bool
    plan: str


@dataclass(frozen=True, slots=True)
class ServiceRow:
    id: str
    state: str
    desired: str
    generation: int
    revision: int


class Invariants:
    def __init__(self, world: World) -> None:
        self.world = world
        self.dirty = False
        self.rows: dict[str, Row] = {}
        self.known: dict[str, Row] = {}
        """Every attempt that there ever was, as it was last."""
        self.services: dict[str, ServiceRow] = {}
        self.payloads: Counter[str] = Counter()
        self.start_calls: Counter[str] = Counter()
        self.alive: list[Engine] = []
        self.launched_by: dict[str, Any] = {}
        self.deadlines: dict[str, int] = {}
        self.excused: dict[str, float] = {}
        self.exited: set[str] = set()
        self.killed_by: dict[str, Any] = {}
        """The process that last found it alive and killed it."""
        self.told: set[tuple[str, Outcome]] = set()
        """What executors said of attempts, in any life: on a full disk it is told and not written, and the next life
        says that nobody knows."""
        self.requests: Counter[str] = Counter()
        self.bad_routes: dict[tuple[str, str, float], float] = {}
        """Since when: by controller, attempt, and for how long a route may mislead for this cause."""
        self.acknowledged: set[tuple[str, int]] = set()
        """(service, revision) of starts that somebody asked for with an acknowledgement."""
        self.transitions: Counter[str] = Counter()
        self._db: sqlite3.Connection | None = None
        self._read: dict[tuple[Any, ...], Row] = {}
        """Attempts by their columns."""

    def fail(self, what: str) -> None:
        self.world.violated(what)

    # What the world tells.

    def on_frame(self, end: End, frame: bytes) -> None:
        if frame[4] == Kind.CALL and b'"op":"start"' in frame[HEADER.size : HEADER.size + 40]:
            attempt_id = json.loads(frame[HEADER.size :])["fence"]["attempt_id"]
            self.start_calls[attempt_id] += 1
            if self.start_calls[attempt_id] > 1:
                self.fail(f"a start was sent twice for {attempt_id}")

    def watch_executor(self, machine: Machine, executor: Executor) -> None:
        ledger = executor.ledger
        real = ledger.record

        def record(attempt_id: str, after: attempt.Record) -> Any:
            before = ledger._entries[attempt_id].record
            entry = real(attempt_id, after)
            self._ledger_step(machine, attempt_id, before, after)
            return entry

        ledger.record = record  # type: ignore[method-assign]

    def _ledger_step(
        self, machine: Machine, attempt_id: str, before: attempt.Record, after: attempt.Record
    ) -> None:
        self.dirty = True
        self.transitions[f"attempt {before.state} → {after.state}"] += before.state is not after.state
        self.world.trace(f"{machine.name}: {attempt_id[-6:]} {after.state}{_how(after)}")
        if before.outcome is not None and after.outcome is not before.outcome:
            self.fail(f"the ledger changed an outcome of {attempt_id}: {before.outcome} to {after.outcome}")
        if after.outcome is not None:
            self.told.add((attempt_id, after.outcome))
            if self.world.calm and after.reason is not None and after.reason.code != "service_stopped":
                self.fail(f"nothing went wrong, and {attempt_id} ended{_how(after)}")
        if before.outcome is None and after.outcome is not None:
            self._observed(machine, attempt_id, after)
        if after.outcome is Outcome.UNKNOWN and not after.start_intended:
            self.fail(f"{attempt_id} never began and ended unknown")
        if after.state is State.RELEASED and machine.group(attempt_id).engines:
            self.fail(f"{attempt_id} is released by its executor, and its engine lives")

    def _observed(self, machine: Machine, attempt_id: str, after: attempt.Record) -> None:
        """A known outcome of what ran needs somebody who saw its end."""
        if after.outcome is Outcome.UNKNOWN or not self.payloads[attempt_id]:
            return
        process = machine.executor
        if self.launched_by[attempt_id] is process:
            return
        if self.launched_by[attempt_id + " boot"] != machine.boot_id:
            self.fail(f"{attempt_id} ran in another boot, and its outcome is {after.outcome}")
        verdict = (machine.directory / "verdicts" / attempt_id).exists()
        if not verdict and self.killed_by.get(attempt_id) is not process:
            self.fail(f"nobody saw the end of {attempt_id}, and its outcome is {after.outcome}: a guess")

    def payload_started(self, engine: Engine) -> None:
        attempt_id, machine = engine.group.name, engine.machine
        self.payloads[attempt_id] += 1
        self.launched_by[attempt_id] = machine.executor
        self.launched_by[attempt_id + " boot"] = machine.boot_id
        self.alive.append(engine)
        self.dirty = True
        self.world.trace(f"{machine.name}: {attempt_id[-6:]} its payload began")
        if self.payloads[attempt_id] > 1:
            self.fail(f"{attempt_id} was started twice")
        assert machine.running is not None
        durable = machine.running.ledger._db.execute(
            "SELECT record FROM attempts WHERE attempt_id = ?", (attempt_id,)
        ).fetchone()
        if durable is None or not self._parse(durable[0]).start_intended:
            self.fail(f"{attempt_id} began without a durable intent of its executor")
        row = self.known.get(attempt_id)
        if row is None or not row.record.start_intended:
            self.fail(f"{attempt_id} began without a durable intent of its controller")
        if machine.clock_ns() > self.deadlines.get(attempt_id, 0) + STOP_BUDGET_SECONDS * SECOND:
            self.fail(f"{attempt_id} began long after its lease")

    def exited_by_itself(self, engine: Engine) -> None:
        self.exited.add(engine.group.name)

    def found_alive(self, engine: Engine, by: Process) -> None:
        self.killed_by[engine.group.name] = by

    def process_ended(self, engine: Engine, by: str) -> None:
        self.dirty = True
        if engine in self.alive:
            self.alive.remove(engine)
            name = engine.group.name
            self.world.trace(f"{engine.machine.name}: {name[-6:]} its payload ended{by and f', by {by}'}")

    def deadline_set(self, machine: Machine, order: dict[str, Any]) -> None:
        attempt_id = order.get("arm") or order.get("deadline")
        if attempt_id is not None:
            self.deadlines[attempt_id] = order["deadline_ns"]

    def request_reached(self, engine: Engine, key: str) -> None:
        self.requests[key] += 1
        if self.requests[key] > 1:
            self.fail(f"request {key} reached an engine twice: it was replayed")
        row = self.known.get(engine.group.name)
        if row is not None and row.service_id in self.services:
            newest = self.services[row.service_id].generation
            newer = [
                one
                for one in self.alive
                if (other := self.known.get(one.group.name)) is not None
                and (other.service_id, other.replica) == (row.service_id, row.replica)
                and other.generation > row.generation
            ]
            if newer:
                self.fail(f"request {key} reached generation {row.generation} while {newest} runs")

    # After every step.

    def after_step(self) -> None:
        if self.dirty:
            self.dirty = False
            self._check_machines()

    def _check_machines(self) -> None:
        running: dict[tuple[str, int], str] = {}
        for engine in self.alive:
            row = self.known.get(engine.group.name)
            if row is None:
                self.fail(f"{engine.group.name} runs, and no controller ever planned it")
                continue
            if row.released:
                self.fail(f"{row.id} is released by its controller, and its engine lives")
            other = running.setdefault((row.service_id, row.replica), row.id)
            if other != row.id:
                self.fail(f"two engines of replica {row.replica} of {row.service_id}: {other} and {row.id}")
        for machine in self.world.machines.values():
            if machine.running is None:
                continue
            held = machine.running.ledger.holding()
            self._check_capacity(f"the ledger of {machine.name}", [entry.plan.limits for entry in held])
            names = {entry.attempt_id for entry in held}
            for engine in self.alive:
                if engine.machine is machine and engine.group.name not in names:
                    self.fail(f"{engine.group.name} lives, and its executor holds nothing of it")

    def _check_capacity(self, what: str, held: list[Limits]) -> None:
        total = placement.total(held)
        if any(getattr(total, name) > getattr(CAPACITY, name) for name in COUNTED):
            self.fail(f"{what} holds more than there is: {total}")

    # After every commit.

    def read(self) -> tuple[dict[str, ServiceRow], dict[str, Row]]:
        if self._db is None:
            self._db = sqlite3.connect(self.world.scaffold.database, isolation_level=None)
        services = {
            row[0]: ServiceRow(*row)
            for row in self._db.execute("SELECT id, state, desired, generation, revision FROM services")
        }
        rows = {}
        for one in self._db.execute(
            "SELECT a.id, a.service_id, a.workload_id, w.replica, a.number, a.node_id, a.generation, a.record,"
            " a.released, a.ready_at, w.plan, a.state FROM attempts a JOIN workloads w ON w.id = a.workload_id"
            " ORDER BY a.generation, a.number"
        ):
            if one not in self._read:
                self._read[one] = self._row(*one)
            rows[one[0]] = self._read[one]
        return services, rows

    def _row(self, *columns: Any) -> Row:
        *keys, record, released, ready_at, plan, state = columns
        parsed = self._parse(record)
        if parsed.state.value != state:
            self.fail(f"{keys[0]} is {state} in its row and {parsed.state} in its record")
        return Row(*keys, parsed, bool(released), ready_at is not None, plan)

    def _parse(self, record: str) -> attempt.Record:
        found = _records.get(record)
        if found is None:
            found = _records[record] = attempt.from_json(json.loads(record))
        return found

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def committed(self) -> None:
        services, rows = self.read()
        if rows == self.rows and services == self.services:
            return
        self.dirty = True
        for one in services.values():
            self._check_service(one)
        for row in rows.values():
            before = self.known.get(row.id)
            if before is None:
                self._check_planned(row, rows)
            elif before != row:
                self._check_change(before, row)
        self.services, self.rows = services, rows
        self.known.update(rows)
        self._check_sums(rows)

    def _check_service(self, after: ServiceRow) -> None:
        before = self.services.get(after.id)
        if before is None or before == after:
            return
        if before.state != after.state:
            self.transitions[f"service {before.state} → {after.state}"] += 1
            self.world.trace(f"service {after.id[-6:]} {after.state}, generation {after.generation}")
        if after.generation < before.generation or after.revision <= before.revision:
            self.fail(f"service {after.id} went back: {before} to {after}")
        if after.generation > before.generation and before.state not in ("stopped", "failed"):
            self.fail(f"service {after.id} got generation {after.generation} while it was {before.state}")
        if after.generation > before.generation:
            lost = [
                row.id
                for row in self.rows.values()
                if row.service_id == after.id and row.record.outcome is Outcome.UNKNOWN
                and row.generation == before.generation and _is_newest(row, self.rows)
            ]  # fmt: skip
            if lost and (after.id, before.revision) not in self.acknowledged:
                self.fail(f"{lost} ended unknown, and service {after.id} was started without acknowledgement")

    def _check_planned(self, row: Row, rows: dict[str, Row]) -> None:
        self.world.trace(f"{row.id[-6:]} planned: {row.service_id[-6:]} {row.replica}, attempt {row.number}")
        for other in rows.values():
            if other.id == row.id or (other.service_id, other.replica) != (row.service_id, row.replica):
                continue
            if not other.released:
                self.fail(f"{row.id} was planned while {other.id} holds its reservation")
            if other.workload_id == row.workload_id and other.record.outcome is Outcome.UNKNOWN:
                self.fail(f"{other.id} ended unknown and was tried again as {row.id}")

    def _check_change(self, before: Row, after: Row) -> None:
        one, other = before.record, after.record
        if one != other:
            self.world.trace(f"{after.id[-6:]} recorded {other.state}{_how(other)}")
            self.transitions[f"mirror {one.state} → {other.state}"] += one.state is not other.state
        if before.released and not after.released:
            self.fail(f"the release of {after.id} was taken back")
        if _ORDER[other.state] < _ORDER[one.state]:
            self.fail(f"{after.id} went back from {one.state} to {other.state}")
        if one.start_intended and not other.start_intended and self.payloads[after.id]:
            self.fail(f"{after.id} ran, and the intent to start it was forgotten")
        if one.outcome is not None and one.outcome is not other.outcome:
            # What nobody could know is known once its executor can be asked again; nothing else changes.
            if one.outcome is not Outcome.UNKNOWN:
                self.fail(f"the outcome of {after.id} changed from {one.outcome} to {other.outcome}")
            elif (after.id, other.outcome) not in self.told:
                self.fail(
                    f"{after.id} was unknown, and is {other.outcome} although its executor never said so"
                )
        if other.outcome is Outcome.UNKNOWN and not other.start_intended:
            self.fail(f"{after.id} never began and ended unknown")
        known = other.outcome is not None and other.outcome is not Outcome.UNKNOWN
        if known and self.payloads[after.id] and (after.id, other.outcome) not in self.told:
            self.fail(f"{after.id} ran, and is {other.outcome} although its executor never said so")
        if after.released and not before.released:
            entry = self._entry(after)
            if entry is not None and entry.record.state in LIVE and entry.record.start_intended:
                self.fail(
                    f"{after.id} is released by its controller while its executor has it {entry.record.state}"
                )

    def _entry(self, row: Row) -> Any:
        for machine in self.world.machines.values():
            if machine.executor_id == row.node_id and machine.running is not None:
                return machine.running.ledger.get(row.id)
        return None

    def _check_sums(self, rows: dict[str, Row]) -> None:
        held: dict[str, list[Limits]] = {}
        replicas: Counter[tuple[str, int]] = Counter()
        for row in rows.values():
            if not row.released:
                replicas[row.service_id, row.replica] += 1
            # A replica that is tried again is planned before its node says whether its place was taken meanwhile.
            if row.record.state in LIVE and row.record.state is not State.PLANNED:
                held.setdefault(row.node_id, []).append(self._limits(row.plan))
        for node_id, limits in held.items():
            self._check_capacity(f"what is recorded of node {node_id}", limits)
        for (service_id, replica), count in replicas.items():
            if count > 1:
                self.fail(f"replica {replica} of {service_id} holds {count} reservations")

    def _limits(self, plan: str) -> Limits:
        if plan not in _limits:
            _limits[plan] = Limits.from_json(json.loads(plan)["limits"])
        return _limits[plan]

    # Now and then.

    def tick(self) -> None:
        now = self.world.loop.now
        for engine in self.alive:
            name, machine = engine.group.name, engine.machine
            if machine.unguarded or engine.stuck_until > now:
                self.excused[name] = now + STOP_BUDGET_SECONDS
            over_ns = self.deadlines.get(name, 0) + STOP_BUDGET_SECONDS * SECOND
            if machine.clock_ns() > over_ns and now > self.excused.get(name, 0.0):
                self.fail(f"{name} lives {STOP_BUDGET_SECONDS} s past its lease")
        self._check_routes(now)

    def _check_routes(self, now: float) -> None:
        bad: dict[tuple[str, str, float], float] = {}
        for controller in self.world.controllers:
            real, process = controller.real, controller.process
            if real is None or process is None or process.stopped or self.world.database_away:
                continue
            for route in real.routes._routes.values():
                for replica in route.replicas:
                    if route.state not in service.ROUTABLE or real.hub.link(replica.node_id) is None:
                        continue
                    patience = self._misleads(route.service_id, route.generation, replica.attempt_id)
                    if patience is None:
                        continue
                    key = controller.name, replica.attempt_id, patience
                    bad[key] = self.bad_routes.get(key, now)
                    if now - bad[key] > patience:
                        self.fail(
                            f"{controller.name} still routes to {replica.attempt_id} after {patience} s"
                        )
        self.bad_routes = bad

    def _misleads(self, service_id: str, generation: int, attempt_id: str) -> float | None:
        """For how long a route may go on leading there; None: it is right."""
        row, found = self.rows.get(attempt_id), self.services.get(service_id)
        if row is None or found is None or found.generation != generation:
            return ROUTE_SECONDS
        if not row.ready or row.record.state is not State.RUNNING:
            return ROUTE_SECONDS
        if not any(engine.group.name == attempt_id for engine in self.alive):
            return SILENT_SECONDS
        return None


_records: dict[str, attempt.Record] = {}
_limits: dict[str, Limits] = {}


def _is_newest(row: Row, rows: dict[str, Row]) -> bool:
    return not any(one.workload_id == row.workload_id and one.number > row.number for one in rows.values())


def _how(record: attempt.Record) -> str:
    if record.outcome is None:
        return ""
    return f", {record.outcome}" + (f" ({record.reason.code})" if record.reason else "")
