"""An executor that is there and says nothing, or is gone, or whose machine changes its clock: what people and callers
see at once, that nothing waits past its deadline, and that all settles once it speaks again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import HERE, Open, ScriptedInstallation
from ficc.controller.node_hub.local import SILENCE_SECONDS
from ficc.domain.lease import SECOND, patience_ns
from support.executor import leftovers

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

TTL_SECONDS = 5
LEASE_OVER_SECONDS = patience_ns(TTL_SECONDS) / SECOND
"""From the last renewal until the controller holds a lease to be over."""
BUSY_SECONDS = 15.0
"""What a busy machine may add."""
DEADLINE_SECONDS = 3
JUMPING_CLOCK = """\
import os, time
real = time.time
def jumping():
    try:
        return real() + float(open(os.environ["TEST_CLOCK_OFFSET"]).read())
    except (OSError, ValueError):
        return real()
time.time = jumping
"""


@pytest.fixture
def clock_offset(tmp_path: Path) -> Path:
    """A file whose number of seconds is added to the wall clock of both processes."""
    directory = tmp_path / "clock"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(JUMPING_CLOCK)
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755)
    offset = tmp_path / "offset"
    offset.write_text("0")
    offset.chmod(0o644)
    return offset


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> str:
    """Of sandboxes; bubblewrap, unless a test asks for another."""
    return str(getattr(request, "param", "bubblewrap"))


@pytest.fixture
def installation(
    tmp_path: Path, clock_offset: Path, provider: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedInstallation]:
    path = [str(clock_offset.parent / "clock"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("TEST_CLOCK_OFFSET", str(clock_offset))
    settings = {"FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS), "FICC_EXECUTOR_PROVIDER": provider}
    made = ScriptedInstallation(tmp_path, settings=settings)
    try:
        made.start()
        yield made
    finally:
        for process in made.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
        made.stop()


def replica(installation: ScriptedInstallation, service_id: str) -> dict[str, Any]:
    found: dict[str, Any] = installation.record(service_id)["replicas"][0]
    return found


def in_flight(installation: ScriptedInstallation, service_id: str) -> int:
    return int(replica(installation, service_id)["in_flight"])


def until_disconnected(installation: ScriptedInstallation, seconds: float) -> None:
    items = installation.until(
        lambda: [one for one in installation.call("GET", "/contributors")["items"] if not one["connected"]],
        "the node is disconnected",
        seconds=seconds,
    )
    assert items


@pytest.mark.parametrize("provider", ["bubblewrap", "podman"], indirect=True)
def test_l4_a_stopped_executor_holds_up_nobody_and_settles_when_it_goes_on(
    installation: ScriptedInstallation,
) -> None:
    service_id = installation.service("one", concurrency=8, deadline_seconds=DEADLINE_SECONDS)["id"]
    executor = installation.processes["executor"]
    executor.send_signal(signal.SIGSTOP)

    asked_at = time.monotonic()
    late = Open(installation, service_id)
    leaving = [Open(installation, service_id) for _ in range(3)]
    installation.until(lambda: in_flight(installation, service_id) == 4, "four requests are being opened")
    for one in leaving:
        one.close()
    installation.until(lambda: in_flight(installation, service_id) == 1, "who left holds no slot", seconds=2)
    answer = late.answer()
    assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
    assert DEADLINE_SECONDS - 0.5 < time.monotonic() - asked_at < SILENCE_SECONDS
    assert in_flight(installation, service_id) == 0

    until_disconnected(installation, SILENCE_SECONDS + BUSY_SECONDS)
    shown = installation.record(service_id)
    assert (shown["state"], shown["replicas"][0]["reason"]["code"]) == ("starting", "node_disconnected")
    assert installation.chat(service_id).code == "service_not_ready"
    installation.control(service_id, "stop").ok(202)
    stopped = installation.settled(service_id, "stopped", seconds=LEASE_OVER_SECONDS + BUSY_SECONDS)
    assert stopped["replicas"][0]["outcome"] == "unknown"

    executor.send_signal(signal.SIGCONT)
    installation.node()
    released = installation.stopped(service_id)["replicas"][0]
    assert released["outcome"] in ("failed", "cancelled")  # it knows by now
    assert not leftovers(released["attempt_id"])


def test_l4_an_open_stream_ends_with_the_silence_of_its_executor(installation: ScriptedInstallation) -> None:
    service_id = installation.service("one")["id"]
    stream = Open(installation, service_id, do="hang", stream=True)
    answer = stream.answer()
    assert answer.status == 200
    installation.processes["executor"].send_signal(signal.SIGSTOP)
    assert b'"peer_lost"' in answer.read()
    assert in_flight(installation, service_id) == 0
    installation.processes["executor"].send_signal(signal.SIGCONT)
    installation.settled(service_id, "ready", seconds=LEASE_OVER_SECONDS + BUSY_SECONDS)


def test_l4_a_service_whose_executor_is_gone_is_not_shown_as_ready(
    installation: ScriptedInstallation,
) -> None:
    before = installation.service("two", replicas=2)
    installation.kill("executor")
    until_disconnected(installation, BUSY_SECONDS)
    shown = installation.record(before["id"])
    assert (shown["state"], shown["desired"]) == ("starting", "running")
    assert shown["reason"]["code"] == "node_disconnected"
    assert [one["reason"]["code"] for one in shown["replicas"]] == ["node_disconnected"] * 2
    assert shown["revision"] == before["revision"]
    assert installation.call("GET", "/inference")["items"][0]["state"] == "starting"
    refused = installation.chat(before["id"])
    assert (refused.status, refused.code) == (503, "service_not_ready")
    installation.start("executor")
    ready = installation.settled(before["id"], "ready")
    assert ready["reason"] is None


def test_l14_a_wall_clock_that_jumps_ahead_ends_no_lease(
    installation: ScriptedInstallation, clock_offset: Path
) -> None:
    service_id = installation.service("one")["id"]
    clock_offset.write_text("3600")
    time.sleep(2 * TTL_SECONDS)
    assert replica(installation, service_id)["attempt"] == 1
    assert installation.chat(service_id).status == 200

    installation.kill("executor")
    clock_offset.write_text("7200")
    time.sleep(3)  # the reconciler looks every second
    assert replica(installation, service_id)["outcome"] is None
    installation.start("executor")
    installation.until(lambda: replica(installation, service_id)["attempt"] == 2, "it is tried again")
    installation.settled(service_id, "ready")


def test_l14_a_wall_clock_that_jumps_back_prolongs_no_lease(
    installation: ScriptedInstallation, clock_offset: Path
) -> None:
    service_id = installation.service("one")["id"]
    installation.kill("executor")
    clock_offset.write_text("-3600")
    found = installation.until(
        lambda: replica(installation, service_id)["outcome"],
        "the lease is over",
        seconds=LEASE_OVER_SECONDS + BUSY_SECONDS,
    )
    assert found == "unknown"
    installation.start("executor")


def test_l14_a_wall_clock_that_jumps_ends_no_deadline_and_prolongs_none(
    installation: ScriptedInstallation, clock_offset: Path
) -> None:
    """Neither that of an engine that loads, nor that of a drain, nor the pause before another attempt."""
    slow = installation.directory / "slow.gguf"
    slow.write_text(f"import time\ntime.sleep(6)\n{(HERE / 'engine.py').read_text()}")
    model_id = installation.add_model(slow, "slow", ["chat"])["id"]
    pauses = {"on_failure": {"delay_seconds": 3}}
    spec = installation.spec("one", model_id=model_id, deadline_seconds=60, restart=pauses)
    service_id = installation.http("POST", "/inference", spec).ok(202)["id"]
    installation.until(lambda: replica(installation, service_id)["state"] == "starting", "it loads")
    clock_offset.write_text("7200")
    assert installation.settled(service_id, "ready")["replicas"][0]["attempt"] == 1

    installation.chat(service_id, do="die")
    installation.until(lambda: replica(installation, service_id)["released"], "it waits for its next attempt")
    clock_offset.write_text("-7200")
    installation.until(lambda: replica(installation, service_id)["attempt"] == 2, "it is tried again")
    installation.settled(service_id, "ready")

    stream = Open(installation, service_id, do="hang", stream=True)
    assert stream.answer().status == 200
    installation.control(service_id, "drain").ok(202)
    time.sleep(2)  # the reconciler looks every second
    clock_offset.write_text("7200")
    time.sleep(2)
    draining = installation.record(service_id)
    assert (draining["state"], draining["replicas"][0]["in_flight"]) == ("draining", 1)
    stream.close()
    installation.settled(service_id, "stopped")
