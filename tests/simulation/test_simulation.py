"""The promise, under simulated faults: never two copies by accident, never a replay, never a silent guess.

L1, L2, L3, L4, L5, L7, L8, L9, L14, L18: `simulation.invariants` says what has to hold after every step, and
`simulation.faults` what goes wrong. A seed that fails is replayed by `make simulate SEED=…`.
"""

from __future__ import annotations

import pytest

from ficc import failpoints
from simulation.command import simulate

SEEDS = 1000
SECONDS = 120


def test_a_seed_is_its_number_and_nothing_else() -> None:
    one, other = (simulate("--seed", "11", "--quiet") for _ in range(2))
    assert one.stdout == other.stdout
    assert "steps" in one.stdout


def test_what_is_remembered_of_the_database_is_what_it_would_say() -> None:
    found = simulate("--seed", "15", "--quiet", "--doubt")
    assert "every promise was kept" in found.stdout, found.stdout + found.stderr


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
