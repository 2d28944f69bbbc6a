"""Each case of services, nodes and leases that must not happen here has a test that says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
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
    found: dict[str, list[str]] = {row: [] for row in ROWS}
    for path in sorted(TESTS.rglob("*.py")):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith(
                "test"
            ):
                continue
            named = {part.upper() for part in node.name.split("_")}
            described = re.findall(r"\bL\d+\b", ast.get_docstring(node) or "")
            for row in named.union(described) & ROWS.keys():
                found[row].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_held_by_a_test(claims: dict[str, list[str]], row: str) -> None:
    assert claims[row], f"no test is named for {row}: {ROWS[row]}"
