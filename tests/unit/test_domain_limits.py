"""Allowances: what is used leaks away, what is over is refused with the time to come back."""

from __future__ import annotations

import random

import pytest

from ficc.domain.limits import Allowance, Excess, Spent, begun, ended, excess, leaked, left

RPM, TPM, CON = "requests_per_minute", "tokens_per_minute", "concurrency"


@pytest.mark.parametrize(
    ("allowance", "spent", "expected"),
    [
        (Allowance(), Spent(1e9, 1e9, 10**9), None),
        (Allowance(60), Spent(0), None),
        (Allowance(60), Spent(59), None),
        (Allowance(60), Spent(59.5), Excess(RPM, 0.5)),
        (Allowance(60), Spent(60), Excess(RPM, 1)),
        (Allowance(1), Spent(1), Excess(RPM, 60)),
        (Allowance(0, 600), Spent(0, 599), None),
        (Allowance(0, 600), Spent(0, 600), Excess(TPM, 0.1)),
        (Allowance(0, 600), Spent(0, 1199), Excess(TPM, 60)),
        (Allowance(60, 600), Spent(60, 1199), Excess(TPM, 60)),
        (Allowance(60, 600), Spent(120, 600), Excess(RPM, 61)),
        (Allowance(0, 0, 2), Spent(0, 0, 1), None),
        (Allowance(0, 0, 2), Spent(0, 0, 2), Excess(CON, 1)),
        (Allowance(60, 600, 1), Spent(99, 9999, 1), Excess(CON, 1)),
    ],
)
def test_what_forbids_one_more_request(allowance: Allowance, spent: Spent, expected: Excess | None) -> None:
    found = excess(spent, allowance)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.limit == expected.limit
        assert found.wait_seconds == pytest.approx(expected.wait_seconds)


@pytest.mark.parametrize(
    ("seconds", "requests", "tokens"), [(0, 30, 900), (30, 0, 600), (90, 0, 0), (-5, 30, 900)]
)
def test_what_was_asked_for_leaks_away_evenly(seconds: float, requests: float, tokens: float) -> None:
    found = leaked(Spent(30, 900, 3, at=100), Allowance(60, 600), 100 + seconds)
    assert found == Spent(requests, tokens, 3, 100 + seconds)


def test_a_refused_request_costs_nothing() -> None:
    before = Spent(5, 50, 1)
    assert ended(begun(before), 0, refused=True) == before
    assert ended(begun(before), 7, refused=False) == Spent(6, 57, 1)
    assert ended(leaked(begun(Spent()), Allowance(60), 100), 0, refused=True).requests == 0
    assert ended(begun(Spent()), 0, refused=True).nothing


@pytest.mark.parametrize("seed", range(5))
def test_whoever_waits_as_long_as_it_is_told_may_go(seed: int) -> None:
    luck = random.Random(seed)
    allowance = Allowance(luck.randrange(1, 100), luck.randrange(1, 10_000))
    spent, now, gone = Spent(), 0.0, 0
    while now < 600:
        spent = leaked(spent, allowance, now)
        found = excess(spent, allowance)
        if found is not None:
            now += found.wait_seconds
            assert excess(leaked(spent, allowance, now), allowance) is None
            continue
        spent, gone = ended(begun(spent), luck.randrange(100), refused=False), gone + 1
    assert gone <= 11 * allowance.requests_per_minute + 1


@pytest.mark.parametrize(
    ("used", "per_minute", "expected"),
    [(0, 60, (60, 60, 0)), (1, 60, (60, 59, 1)), (90, 60, (60, 0, 90)), (0.5, 2, (2, 1, 15))],
)
def test_what_is_left(used: float, per_minute: int, expected: tuple[int, int, float]) -> None:
    assert left(used, per_minute) == expected
