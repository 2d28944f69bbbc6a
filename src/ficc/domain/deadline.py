"""A deadline that was written down by the wall clock, judged by CLOCK_BOOTTIME.

Whoever sees it first takes down how much of it is left, and goes by that: a jump of the wall clock afterwards
neither ends nor prolongs it. A jump before (while nobody was there who had seen it) can at worst end it at once
or let it begin anew: more than its whole length is never waited.
"""

from __future__ import annotations

from dataclasses import dataclass

SECOND = 1_000_000_000  # in nanoseconds


@dataclass(frozen=True, slots=True)
class Seen:
    """A deadline as it was recorded, and when it is due on the CLOCK_BOOTTIME of who saw it."""

    at: float
    due_ns: int


def see(at: float, length_seconds: float, now: float, now_ns: int) -> Seen:
    """A deadline `at` that began `length_seconds` before it, seen for the first time now."""
    left = min(max(at - now, 0.0), length_seconds)
    return Seen(at, now_ns + int(left * SECOND))
