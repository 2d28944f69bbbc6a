"""That the simulation can fail: each rule that is broken on purpose is noticed."""

from __future__ import annotations

import pytest

from simulation.command import simulate
from simulation.mutations import MUTATIONS

NOTICED_WITHIN_SEEDS = 300


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [one.name for one in MUTATIONS])
def test_a_rule_that_is_broken_is_noticed(name: str) -> None:
    found = simulate("--mutation", name, "--seeds", str(NOTICED_WITHIN_SEEDS))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "noticed:" in found.stdout
