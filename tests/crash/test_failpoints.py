"""A real process that dies, as by SIGKILL, at every boundary between what is durable and what is done. Then it comes
back, and everything settles: nothing ran twice, no request was replayed, every attempt has the outcome that somebody
observed, and nothing is left.

L3, L4, L7: one process dies at a time, so somebody always saw how an engine ended, and no outcome is unknown.
"""

from __future__ import annotations

import http.client
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from contract.scripted import ScriptedInstallation
from ficc import failpoints
from support.executor import is_alive

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

TTL_SECONDS = 6
DEATH_SECONDS = 45.0
"""By when an armed process has passed its point."""
PASSES = {
    # These are passed by what a process does when it starts; a later pass is in the middle of an attempt.
    "controller.before_commit": 12,
    "controller.committed": 12,
    "executor.before_write": 3,
    "executor.written": 3,
}
ALONE = "executor.lapsed"
"""Passed once nobody renews."""
ON_THE_WAY_UP = "executor.left_behind_recorded"
ENDING = frozenset(
    {
        "controller.stop_decided",
        "controller.release_recorded",
        "executor.stop_requested",
        "executor.end_observed",
        "executor.end_recorded",
        "executor.cleaned_up",
        "executor.lease_given_back",
        "executor.released",
    }
)
"""Passed when a service is stopped."""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedInstallation]:
    settings = {"FICC_LEASES_TTL_SECONDS": str(TTL_SECONDS)}
    with ScriptedInstallation(tmp_path_factory.mktemp("ficc"), settings=settings) as made:
        assert made.model_id
        assert made.python
        yield made


def start_armed(installation: ScriptedInstallation, name: str, point: str) -> None:
    installation.environment[failpoints.VARIABLE] = f"{point}:{PASSES.get(point, 1)}"
    try:
        installation.start(name)
    finally:
        del installation.environment[failpoints.VARIABLE]


def died(installation: ScriptedInstallation, name: str) -> bool:
    """Whether the armed process met its end."""
    return installation.processes[name].poll() == -signal.SIGKILL


def until_dead(installation: ScriptedInstallation, name: str, doing: Callable[[], None]) -> None:
    """Go on with what people do, whose answers may be lost, until the process has passed its point."""
    deadline = time.monotonic() + DEATH_SECONDS
    while not died(installation, name):
        assert time.monotonic() < deadline, f"the {name} never passed its point"
        with suppress(OSError, http.client.HTTPException, AssertionError):
            doing()
        time.sleep(0.05)


class People:
    """They want one service that answers, and then that it stops, or only the first."""

    def __init__(self, installation: ScriptedInstallation, alias: str, *, to_the_end: bool) -> None:
        self.installation = installation
        self.alias = alias
        self.to_the_end = to_the_end
        self.asked = 0

    def found(self) -> dict[str, Any] | None:
        items = self.installation.http("GET", "/inference").ok()["items"]
        return next((one for one in items if one["alias"] == self.alias), None)

    def ask(self, service_id: str) -> int:
        """The status of the answer to a request like no other."""
        self.asked += 1
        return self.installation.chat(service_id, key=f"{self.alias} {self.asked}", do="report").status

    def are_answered(self) -> bool:
        service = self.found()
        return service is not None and self.ask(service["id"]) == 200

    def act(self) -> None:
        service = self.found()
        if service is None:
            self.installation.http("POST", "/inference", self.installation.spec(self.alias)).ok(202)
        elif service["state"] == "ready":
            self.ask(service["id"])
            if self.to_the_end:
                self.installation.control(service["id"], "stop")
        elif service["state"] in ("stopped", "failed") and self.to_the_end:
            self.installation.control(service["id"], "start")


def processes(attempt_id: str) -> list[int]:
    """What lives in the control groups of an attempt."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with suppress(OSError):
            if attempt_id in path.read_text() and is_alive(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def outcomes(installation: ScriptedInstallation) -> dict[str, tuple[str, str, int]]:
    """Of every attempt that the executor knows: state, outcome and generation."""
    file = installation.directory / "executor" / "ledger.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        rows = db.execute(
            "SELECT attempt_id, record ->> 'state', record ->> 'outcome', generation FROM attempts"
        )
        return {attempt_id: (state, outcome, generation) for attempt_id, state, outcome, generation in rows}


def lines(installation: ScriptedInstallation, attempt_id: str) -> list[str]:
    log = installation.directory / "executor" / "logs" / f"{attempt_id}.log"
    return log.read_text().splitlines() if log.exists() else []


def check_all_is_well(installation: ScriptedInstallation, people: People, before: set[str]) -> None:
    """It settles, nothing ran twice, nothing is left."""
    if people.found() is None:
        people.act()
    service = people.found()
    assert service is not None
    if installation.settled(service["id"], "ready", "stopped", "failed")["state"] != "ready":
        installation.control(service["id"], "start").ok(202)
    installation.until(people.are_answered, "the service answers", seconds=60)
    installation.remove(service["id"])
    made = {one: found for one, found in outcomes(installation).items() if one not in before}
    assert made
    assert {state for state, _, _ in made.values()} == {"released"}
    assert {outcome for _, outcome, _ in made.values()} <= {"cancelled", "failed"}
    requests = [line for one in made for line in lines(installation, one) if line.startswith("request ")]
    assert len(requests) == len(set(requests)), "a request was replayed"
    for one in made:
        assert processes(one) == []
    assert list((installation.directory / "executor" / "verdicts").iterdir()) == []
    with closing(sqlite3.connect(installation.directory / "controller" / "ficc.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM attempts WHERE NOT released").fetchone() == (0,)


@pytest.fixture
def alone(installation: ScriptedInstallation) -> Iterator[None]:
    """Nothing is left for the next test, not even by one that failed."""
    yield
    for name in ("executor", "controller"):
        if name not in installation.processes or installation.processes[name].poll() is not None:
            installation.start(name)
    installation.node()
    for service in installation.http("GET", "/inference").ok()["items"]:
        installation.remove(service["id"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("point", failpoints.NAMES)
def test_a_process_that_dies_there_comes_back_and_all_is_well(
    installation: ScriptedInstallation, point: str
) -> None:
    name, _, what = point.partition(".")
    other = "controller" if name == "executor" else "executor"
    before = set(outcomes(installation))
    people = People(installation, what.replace("_", "-"), to_the_end=point in ENDING)
    if point in (ALONE, ON_THE_WAY_UP):
        people.act()
        service = people.found()
        assert service is not None
        installation.settled(service["id"], "ready")
    if point == ON_THE_WAY_UP:
        installation.kill(name)
        with pytest.raises(AssertionError, match="the executor ended"):
            start_armed(installation, name, point)
    elif point == ALONE:
        installation.kill(name, signal.SIGTERM)
        start_armed(installation, name, point)
        installation.node()
        installation.settled(service["id"], "ready")
        installation.kill(other)
    else:
        installation.kill(name, signal.SIGTERM)
        start_armed(installation, name, point)
    until_dead(installation, name, people.act if other in installation.processes else lambda: None)
    del installation.processes[name]
    if name == "executor":
        installation.executor_socket.unlink(missing_ok=True)
    installation.start(name)
    if other not in installation.processes:
        installation.start(other)
    installation.node()
    check_all_is_well(installation, people, before)


def test_the_points_are_those_that_the_code_passes() -> None:
    source = Path(failpoints.__file__).parent
    text = "".join(path.read_text() for path in source.rglob("*.py") if path.name != "failpoints.py")
    passed = {name for name in failpoints.NAMES if f'failpoint("{name}")' in text}
    assert passed == set(failpoints.NAMES)
    assert text.count('failpoint("') == len(failpoints.NAMES)
