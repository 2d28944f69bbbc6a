"""When a lease is held to be over. What was written in another boot, or by another controller, says nothing about this
one's clock, so of each attempt it is kept in memory since when its newest lease is known here."""

from __future__ import annotations

from collections.abc import Collection

from ficc.controller.operations.context import Context
from ficc.controller.store.attempts import Attempt
from ficc.domain import lease


class Beliefs:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[str, tuple[int, int]] = {}
        """By attempt: the newest lease sequence that was read, and when it was first, CLOCK_BOOTTIME ns."""

    def over_in_seconds(self, one: Attempt) -> float:
        """From now until the attempt's lease is held to be over; not above zero: it is, or none was ever sent."""
        if one.belief is None:
            return 0.0
        boot_id, now_ns = self._context.lease_clock()
        over_ns = lease.over_in_this_boot(one.belief, boot_id, self._seen_since(one, now_ns))
        return (over_ns - now_ns) / lease.SECOND

    def is_over(self, one: Attempt) -> bool:
        """Whether a lease was sent, and is held to be over."""
        if one.belief is None:
            return False
        boot_id, now_ns = self._context.lease_clock()
        return lease.believed_over(one.belief, boot_id, now_ns, self._seen_since(one, now_ns))

    def _seen_since(self, one: Attempt, now_ns: int) -> int:
        if self._seen.get(one.id, (0, 0))[0] != one.lease_sequence:
            self._seen[one.id] = one.lease_sequence, now_ns
        return self._seen[one.id][1]

    def forget_all_but(self, held: Collection[str]) -> None:
        """Keep in memory only what concerns these attempts."""
        self._seen = {attempt_id: seen for attempt_id, seen in self._seen.items() if attempt_id in held}
