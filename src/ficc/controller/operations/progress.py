"""What engines say while they load: the last line of each, kept in memory for whoever looks."""

from __future__ import annotations

from collections.abc import Collection


class Progress:
    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def note(self, attempt_id: str, line: str) -> None:
        self._lines[attempt_id] = line

    def of(self, attempt_id: str) -> str:
        """The last line of an attempt's engine; empty if it said nothing."""
        return self._lines.get(attempt_id, "")

    def forget_all_but(self, held: Collection[str]) -> None:
        self._lines = {attempt_id: line for attempt_id, line in self._lines.items() if attempt_id in held}
