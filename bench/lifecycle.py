"""The lifecycle rows of the performance budget: what a start and a stop add to the engine's own time, how soon it is
known that an engine died, and what the leases of many attempts cost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from bench.load import median_ms, percentile, used
from bench.relay import table
from bench.setup import Bench
from ficc import clock
from ficc.client.api import Api
from ficc.client.executor import Control, fence_document
from ficc.domain.attempt import Record, State, as_json
from ficc.domain.lease import TTL_SECONDS_DEFAULT, Renew, patience_ns, renewal_interval_seconds
from ficc.domain.plan import LEAST, Fence, Limits, Plan
from ficc.identifiers import new_id
from ficc.images.build import LLAMA_SERVER

ROUNDS = 12
POLL_SECONDS = 0.05
"""Seldom, so that what is measured is not the cost of looking: the moments themselves are in the record."""
PATIENCE_SECONDS = 60.0
ATTEMPTS = 200
ROUNDS_OF_RENEWALS = 3


async def starts_and_stops(bench: Bench) -> None:
    """From the submission to `ready`, less what the engine takes by itself; from the stop to everything released. The
    engine ends on SIGTERM at once, so it uses nothing of its grace."""
    await bench.rest()
    started, engine, added, stopped, known = [], [], [], [], []
    async with bench.api() as api:
        for number in range(ROUNDS):
            spec = bench.specification(f"round-{number}", replicas=1, concurrency=4, cpu_millis=2000)
            began = time.time()
            service = await api.call("POST", "/inference", spec)
            service = await _until(api, service, lambda found: found["state"] == "ready")
            started.append(_moment(service["replicas"][0]["ready_at"]) - began)
            engine.append(await _engine_seconds(api, service))
            added.append(started[-1] - engine[-1])
            killed = number % 2 == 1
            if killed:
                known.append(await _kill(api, service))
            began = time.time()
            await _act(api, service, "stop")
            service = await _until(api, service, _released)
            if not killed:
                stopped.append(_moment(service["replicas"][0]["since_at"]) - began)
            await _act(api, service, "remove")
    rows: list[list[object]] = [
        _row("submit to ready", started, ""),
        _row("of this the engine itself, until it listens", engine, ""),
        _row("added by ficc", added, "budget 300 ms"),
        _row("stop to released", stopped, "budget 1000 ms after the grace"),
        _row("engine killed to shown", known, "budget 2000 ms"),
    ]
    table("Starts and stops", [f"{ROUNDS} rounds", "p50", "p90", ""], rows)


def _row(name: str, took: Sequence[float], remark: str) -> list[object]:
    return [name, f"{median_ms(took):.0f} ms", f"{percentile(took, 0.9) * 1000:.0f} ms", remark]


def _moment(text: str) -> float:
    """A time of the API, as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


async def _engine_seconds(api: Api, service: dict[str, Any]) -> float:
    """How long the engine took by itself until it listened, as it says in its log."""
    log = await api.call("GET", f"/inference/{service['id']}/logs")
    (line,) = (line for line in log["text"].splitlines() if line.startswith("listening "))
    return float(line.split()[1])


async def _kill(api: Api, service: dict[str, Any]) -> float:
    """SIGKILL for the engine; seconds until its service is shown as something else than ready."""
    (replica,) = service["replicas"]
    began = time.time()
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            inside = replica["attempt_id"] in path.read_text()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if inside and b"bwrap" not in command:
            os.kill(int(path.parent.name), signal.SIGKILL)
    found = await _until(api, service, lambda found: found["state"] != "ready")
    return _moment(found["updated_at"]) - began


async def _until(
    api: Api, service: dict[str, Any], there: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        found: dict[str, Any] = await api.call("GET", f"/inference/{service['id']}")
        if there(found):
            return found
        await asyncio.sleep(POLL_SECONDS)
    raise SystemExit(f"{service['alias']} is {found['state']}: {found['reason']}")


def _released(found: dict[str, Any]) -> bool:
    return found["state"] in ("stopped", "failed") and all(one["released"] for one in found["replicas"])


async def _act(api: Api, service: dict[str, Any], action: str) -> None:
    found = await api.call("GET", f"/inference/{service['id']}")
    await api.call("POST", f"/inference/{service['id']}/control/{action}", {"revision": found["revision"]})


# Leases.


async def renewals(bench: Bench) -> None:
    """What controller, executor and watchdog use with many small attempts admitted, less what they use without."""
    await bench.rest()
    seconds = ROUNDS_OF_RENEWALS * renewal_interval_seconds(TTL_SECONDS_DEFAULT)
    pids = [*bench.ours, *(child.pid for child in psutil.Process(bench.processes["executor"].pid).children())]
    idle = await _cpu_seconds(pids, seconds)
    control = Control()
    await control.open(bench.state / "run" / "executor.sock", "control")
    fences = await _admit(bench, control)
    await asyncio.to_thread(_record, bench, fences)
    busy = await _cpu_seconds(pids, seconds)
    told = [(await control.call("status", attempt_id=one.attempt_id))["lease"] for one in fences]
    renewed = sum(one["renewals"] for one in told)
    await asyncio.to_thread(_forget, bench)
    reason = {"code": "stopped", "message": "The benchmark is done."}
    for fence in fences:
        arguments = {"reason": reason, "outcome": "cancelled", "grace_seconds": 0}
        await control.call("stop", fence=fence_document(fence), **arguments)
    control.close()
    cost = busy - idle
    rows: list[list[object]] = [
        [
            f"{renewed} of {ATTEMPTS * ROUNDS_OF_RENEWALS}",
            f"{100 * cost / seconds:.2f} % (budget 2)",
            f"{1e6 * cost / max(1, renewed):.0f} µs",
            f"{100 * idle / seconds:.2f} %",
        ]
    ]
    columns = [f"renewals of {ATTEMPTS} attempts", "of one core", "CPU per renewal", "idle besides"]
    table("Leases", columns, rows)


async def _cpu_seconds(pids: Sequence[int], seconds: float) -> float:
    before = used(pids)[0]
    await asyncio.sleep(seconds)
    return used(pids)[0] - before


async def _admit(bench: Bench, control: Control) -> list[Fence]:
    """Attempts as small as an executor takes them, prepared and never started."""
    fences = []
    for _ in range(ATTEMPTS):
        plan = Plan(
            node_id=bench.node_id,
            runtime=bench.runtime,
            argv=(LLAMA_SERVER,),
            environment={},
            limits=Limits(**LEAST),
        )
        fence = Fence(new_id(), 1, plan.digest)
        first = Renew(1, clock.boot_id(), clock.now_ns(), TTL_SECONDS_DEFAULT)
        await control.call("admit", fence=fence_document(fence), plan=plan.as_json(), lease=asdict(first))
        fences.append(fence)
    return fences


def _record(bench: Bench, fences: Sequence[Fence]) -> None:
    """The controller's rows of them, straight into its database, of a service that is not there: it renews their
    leases and takes no step."""
    prepared = json.dumps(as_json(Record(State.PREPARED)))
    over_ns = clock.now_ns() + patience_ns(TTL_SECONDS_DEFAULT)
    database = sqlite3.connect(bench.state / "controller" / "ficc.sqlite", timeout=30)
    with database:
        database.row_factory = sqlite3.Row
        row = dict(database.execute("SELECT * FROM attempts WHERE released LIMIT 1").fetchone())
        for number, fence in enumerate(fences):
            row |= {
                "id": fence.attempt_id,
                "service_id": "0" * 26,
                "number": 1000 + number,
                "generation": fence.generation,
                "plan_digest": fence.plan_digest,
                "state": State.PREPARED.value,
                "record": prepared,
                "released": False,
                "boot_id": clock.boot_id(),
                "lease_sequence": 1,
                "lease_over_ns": over_ns,
                "lease_over_boot_id": clock.boot_id(),
                "lease_ttl_seconds": TTL_SECONDS_DEFAULT,
            }
            columns, marks = ", ".join(f'"{name}"' for name in row), ", ".join("?" for _ in row)
            database.execute(f"INSERT INTO attempts ({columns}) VALUES ({marks})", list(row.values()))
    database.close()


def _forget(bench: Bench) -> None:
    database = sqlite3.connect(bench.state / "controller" / "ficc.sqlite", timeout=30)
    with database:
        database.execute("DELETE FROM attempts WHERE number >= 1000")
    database.close()
