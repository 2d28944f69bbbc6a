"""Each case of services, nodes and leases that must not happen here has a test that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.named import TESTS, named_for

ROWS = {
    "L1": "an engine that is killed: replica and routes follow, its log stays",
    "L2": "a cut longer than the lease: the executor ends the engine before the controller believes it",
    "L3": "a controller restarted within the lease: engines untouched, no new attempt",
    "L4": "an executor killed or stopped: its watchdog ends what it ran",
    "L5": "a machine that was rebooted: attempts end unknown, and are released after cleanup",
    "L6": "one placement of three does not fit: nothing is created",
    "L7": "a lost answer is looked up, never sent again",
    "L8": "two act at the same moment: one wins by revision",
    "L9": "10,000 random steps: nothing waits past its deadline, no slot is lost",
    "L10": "an engine that cannot load its model: failed, with its own last lines",
    "L11": "a GPU that is gone: refused, never a silent fall back",
    "L12": "memory that another process took: preview and start refuse, with the numbers",
    "L13": "a node that accepts no connection from a network",
    "L14": "a clock that is wrong or jumps: leases unaffected",
    "L15": "an executor without endpoints: jobs run, inference is refused with the reason",
    "L16": "an upgrade with services in every state: migrates, or leaves the old schema",
    "L17": "an engine log of gigabytes: bounded, the newest kept",
    "L18": "an engine that ignores SIGTERM and forks: the whole tree is gone before the release",
}


@pytest.fixture(scope="module")
def claims() -> dict[str, list[str]]:
    """By row: the tests whose name or description has it."""
    return named_for(ROWS, (path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)))


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_held_by_a_test(claims: dict[str, list[str]], row: str) -> None:
    assert claims[row], f"no test is named for {row}: {ROWS[row]}"
