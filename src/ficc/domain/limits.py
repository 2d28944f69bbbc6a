"""How much a credential, and a project, may ask for: requests and tokens per minute, and requests at once.

What was asked for leaks away evenly, a minute's allowance in a minute (a leaky bucket), so there is no moment at which
everything may be asked for anew. Tokens are known once an answer is there: who has used up the minute's waits until
some of it has leaked away, and a single answer may go over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

MINUTE_SECONDS = 60.0
LIMIT_MAX = 10**12
"""Of any limit."""
CONCURRENCY_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)


UNLIMITED = Allowance()


class Spent(NamedTuple):
    """What of an allowance is used at a moment, `at` in seconds of any clock."""

    requests: float = 0.0
    tokens: float = 0.0
    running: int = 0
    at: float = 0.0

    @property
    def nothing(self) -> bool:
        return not (self.requests or self.tokens or self.running)


class Excess(NamedTuple):
    """Which limit is reached, and how long until the next request may come."""

    limit: str
    wait_seconds: float


class Left(NamedTuple):
    """Of one limit: how much it is, how much of it is left, and how long until all of it is."""

    limit: int
    remaining: int
    reset_seconds: float


def leaked(spent: Spent, allowance: Allowance, now: float) -> Spent:
    """The same at a later moment."""
    minutes = max(0.0, now - spent.at) / MINUTE_SECONDS
    return Spent(
        max(0.0, spent.requests - allowance.requests_per_minute * minutes),
        max(0.0, spent.tokens - allowance.tokens_per_minute * minutes),
        spent.running,
        now,
    )


def excess(spent: Spent, allowance: Allowance) -> Excess | None:
    """What forbids one more request at this moment."""
    if allowance.concurrency and spent.running >= allowance.concurrency:
        return Excess("concurrency", CONCURRENCY_RETRY_SECONDS)
    found = None
    if allowance.requests_per_minute:
        over = spent.requests + 1 - allowance.requests_per_minute
        found = _excess("requests_per_minute", over, allowance.requests_per_minute, found)
    if allowance.tokens_per_minute:
        over = spent.tokens + 1 - allowance.tokens_per_minute
        found = _excess("tokens_per_minute", over, allowance.tokens_per_minute, found)
    return found


def _excess(limit: str, over: float, per_minute: int, other: Excess | None) -> Excess | None:
    if over <= _ROUNDING:
        return other
    wait = over * MINUTE_SECONDS / per_minute
    return other if other is not None and other.wait_seconds >= wait else Excess(limit, wait)


_ROUNDING = 1e-6
"""Of a request or token: what floating-point numbers may be off by."""


def begun(spent: Spent) -> Spent:
    """With one more request."""
    return spent._replace(requests=spent.requests + 1, running=spent.running + 1)


def ended(spent: Spent, tokens: int, *, refused: bool) -> Spent:
    """Without a request that ran, which took these tokens; one that was refused cost nothing."""
    return spent._replace(
        requests=max(0.0, spent.requests - refused),
        tokens=spent.tokens + tokens,
        running=spent.running - 1,
    )


def left(used: float, per_minute: int) -> Left:
    remaining = max(0, math.floor(per_minute - used + _ROUNDING))
    return Left(per_minute, remaining, used * MINUTE_SECONDS / per_minute)
