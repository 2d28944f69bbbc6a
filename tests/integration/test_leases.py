"""Leases from end to end: a real controller renews them at a real executor, on a connection that nothing else uses.

L14, the static half: nothing that has to do with a lease reads a clock that can be set.
"""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ficc
from contract.scripted import LIMITS, Open, ScriptedInstallation
from ficc.client.executor import Control

TTL_SECONDS = 5
STREAMS = 64
PACKAGE = Path(ficc.__file__).parent
LEASE_MODULES = (
    "domain/lease.py",
    "executor/guard.py",
    "executor/watchdog.py",
    "executor/server.py",
    "controller/reconcilers/leases.py",
    "controller/node_hub/local.py",
    "protocol/executor_wire.py",
)
"""Everything that a grant or a renewal passes, and what decides on it."""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    settings = {"FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS)}
    with ScriptedInstallation(tmp_path_factory.mktemp("leases"), settings=settings) as made:
        yield made


def told(installation: ScriptedInstallation, attempt_id: str) -> dict[str, Any]:
    """What the executor itself says of a lease."""

    async def ask() -> dict[str, Any]:
        control = Control()
        try:
            await control.open(installation.executor_socket, "control")
            return dict((await control.call("status", attempt_id=attempt_id))["lease"])
        finally:
            control.close()

    return asyncio.run(ask())


@pytest.mark.root
@pytest.mark.timeout(180)
def test_64_saturated_streams_that_nobody_reads_cost_no_renewal(installation: ScriptedInstallation) -> None:
    """For several times a lease's length: no attempt ends, and every renewal that was committed arrived, in turn."""
    limits = {**LIMITS, "processes": 128, "memory_bytes": 320 << 20, "cpu_millis": 500}
    node_id = installation.node()["id"]
    placements = [{"node_id": node_id, "limits": limits}] * 2
    service = installation.service("slow", 2, concurrency=STREAMS // 2, placements=placements)
    attempts = [one["attempt_id"] for one in service["replicas"]]
    streams = [Open(installation, service["id"], do="pour", stream=True) for _ in range(STREAMS)]
    answers = [stream.answer() for stream in streams]
    assert [answer.status for answer in answers] == [200] * STREAMS
    in_flight = [one["in_flight"] for one in installation.record(service["id"])["replicas"]]
    assert in_flight == [STREAMS // 2] * 2
    before = [told(installation, one) for one in attempts]

    time.sleep(4 * TTL_SECONDS)

    record = installation.record(service["id"])
    assert [one["attempt_id"] for one in record["replicas"]] == attempts
    assert [one["in_flight"] for one in record["replicas"]] == [STREAMS // 2] * 2
    for one, then in zip(attempts, before, strict=True):
        now = told(installation, one)
        assert (
            now["sequence"] == 1 + now["renewals"]
        )  # the first came with the admission, and none is missing
        assert now["renewals"] - then["renewals"] >= 2 * 4
        assert now["deadline_ns"] > then["deadline_ns"]
    for answer in answers:
        assert len(answer.read(1 << 16)) == 1 << 16
    for stream in streams:
        stream.close()
    installation.remove(service["id"])


@pytest.mark.parametrize("module", LEASE_MODULES)
def test_l14_no_lease_is_measured_on_a_clock_that_can_be_set(module: str) -> None:
    """Of the module `time` they use nothing but sleep and the name of CLOCK_BOOTTIME; leases read `ficc.clock`."""
    tree = ast.parse((PACKAGE / module).read_text())
    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            read.add(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            read |= {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"datetime"}
    assert read <= {"sleep", "CLOCK_BOOTTIME"}


def test_l14_the_clock_of_leases_is_boottime_alone() -> None:
    source = (PACKAGE / "clock.py").read_text()
    assert {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    } == {"clock_gettime_ns", "CLOCK_BOOTTIME"}
