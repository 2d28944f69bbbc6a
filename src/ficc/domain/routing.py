"""Which replica takes a request: the one with the fewest in flight that has room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A ready replica as the gateway counts it. The count is a hint: the executor enforces it."""

    attempt_id: str
    in_flight: int
    concurrency: int


def pick(candidates: Sequence[Candidate], *, turn: int, without: Collection[str] = ()) -> str | None:
    """The attempt that takes the request, or None when each is full or excluded.

    `turn` is any counter: it spreads ties, so that idle replicas share the work.
    """
    best: Candidate | None = None
    for step in range(len(candidates)):
        candidate = candidates[(turn + step) % len(candidates)]
        if candidate.attempt_id in without or candidate.in_flight >= candidate.concurrency:
            continue
        if best is None or candidate.in_flight < best.in_flight:
            best = candidate
    return None if best is None else best.attempt_id
