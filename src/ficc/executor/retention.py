"""Which released attempts are forgotten, with their logs: a decision from their order and how much they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

OF_ONE_PLAN = 5
"""The newest attempts at one plan: they go last, so that what fails again and again, or many short jobs, cost nobody
else's logs."""


@dataclass(frozen=True, slots=True)
class Released:
    attempt_id: str
    plan_digest: str
    log_bytes: int


def surplus(newest_first: Sequence[Released], number_max: int, bytes_max: int) -> list[str]:
    """What to forget so that no more than so many attempts with so many bytes of logs are left: the oldest, and
    before those the oldest of plans that have more than OF_ONE_PLAN."""
    seen: Counter[str] = Counter()
    many: list[Released] = []
    few: list[Released] = []
    for one in newest_first:
        seen[one.plan_digest] += 1
        (many if seen[one.plan_digest] > OF_ONE_PLAN else few).append(one)
    number, size = len(newest_first), sum(one.log_bytes for one in newest_first)
    forgotten = []
    for one in [*reversed(many), *reversed(few)]:
        if number <= number_max and size <= bytes_max:
            break
        number, size = number - 1, size - one.log_bytes
        forgotten.append(one.attempt_id)
    return forgotten
