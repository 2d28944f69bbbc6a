"""Who is next among those that wait: callers take turns, whoever waits with many requests and whoever with one.

Source: fair queueing by rounds (Nagle, RFC 970). A caller's waiting requests stand in consecutive rounds; within a
round it is first come, first served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple


class Turn(NamedTuple):
    round: int
    number: int
    """Counts those that came."""
    caller: str


class Turns:
    """Those that wait, in the order in which they are served."""

    def __init__(self) -> None:
        self._waiting: list[Turn] = []
        self._round = 0
        """Of the one that was served last."""
        self._number = 0
        self._latest: dict[str, int] = {}
        """The last round in which a caller waits."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> Turn | None:
        return self._waiting[0] if self._waiting else None

    def join(self, caller: str) -> Turn:
        """Wait from here on."""
        turn = Turn(self._round_of(caller), self._number, caller)
        self._number += 1
        self._latest[caller] = turn.round
        insort(self._waiting, turn)
        return turn

    def leave(self, turn: Turn, *, served: bool) -> None:
        """Wait no longer. Leaving twice changes nothing."""
        at = bisect_left(self._waiting, turn)
        if at == len(self._waiting) or self._waiting[at] != turn:
            return
        del self._waiting[at]
        if served:
            self._round = max(self._round, turn.round)
        if self._latest[turn.caller] == turn.round:
            del self._latest[turn.caller]
            for other in reversed(self._waiting):
                if other.caller == turn.caller:
                    self._latest[turn.caller] = other.round
                    break

    def displaced_by(self, caller: str) -> Turn | None:
        """The last of all, if one more of this caller's would be served before it: in a full queue it gives way."""
        last = self._waiting[-1] if self._waiting else None
        return last if last is not None and self._round_of(caller) < last.round else None

    def _round_of(self, caller: str) -> int:
        return max(self._round, self._latest.get(caller, 0)) + 1
