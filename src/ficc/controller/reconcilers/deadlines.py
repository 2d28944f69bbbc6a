"""Recorded deadlines as this controller judges them: by its CLOCK_BOOTTIME, from when it first saw each."""

from __future__ import annotations

from collections.abc import Collection

from ficc.controller.operations.context import Context
from ficc.domain import deadline
from ficc.domain.deadline import Seen


class Deadlines:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[str, Seen] = {}

    def passed(self, of: str, at: float | None, length_seconds: float) -> bool:
        """Whether the deadline of this object, `at` by the wall clock, is past. It is `length_seconds` long."""
        if at is None:
            return False
        _, now_ns = self._context.lease_clock()
        seen = self._seen.get(of)
        if seen is None or seen.at != at:
            seen = self._seen[of] = deadline.see(at, length_seconds, self._context.now(), now_ns)
        return now_ns >= seen.due_ns

    def forget_all_but(self, held: Collection[str]) -> None:
        self._seen = {of: seen for of, seen in self._seen.items() if of in held}
