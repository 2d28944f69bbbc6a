"""The promise, under simulated faults: never two copies by accident, never a replay, never a silent guess.

L1, L2, L3, L4, L5, L7, L8, L9, L14, L18: `simulation.invariants` says what has to hold after every step, and
`simulation.faults` what goes wrong. A seed that fails is replayed by `make simulate SEED=…`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ficc import failpoints
from simulation.mutations import MUTATIONS

TESTS = Path(__file__).parents[1]
SEEDS = 1000
SECONDS = 120
NOTICED_WITHIN_SEEDS = 300


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it puts simulated parts in the place of real ones."""
    return subprocess.run(
        [sys.executable, "-m", "simulation", *arguments],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
    )


def test_a_seed_is_its_number_and_nothing_else() -> None:
    one, other = (simulate("--seed", "11", "--quiet") for _ in range(2))
    assert one.stdout == other.stdout
    assert "steps" in one.stdout


@pytest.mark.timeout(600)
def test_some_seeds() -> None:
    found = simulate("--seeds", "20")
    assert found.returncode == 0, found.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_seeds() -> None:
    found = simulate("--seeds", str(SEEDS), "--seconds", str(SECONDS))
    print(found.stdout)
    assert found.returncode == 0, found.stdout[-20_000:]
    assert f"failpoints passed: {len(failpoints.NAMES)} of" in found.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [one.name for one in MUTATIONS])
def test_a_rule_that_is_broken_is_noticed(name: str) -> None:
    found = simulate("--mutation", name, "--seeds", str(NOTICED_WITHIN_SEEDS))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "noticed:" in found.stdout
