"""How much memory each attempt has taken at most: resident memory of its processes, not what its cgroup is charged,
since the page cache of a file belongs to whoever touched it first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable

RISE = 1.01
"""A peak is told again once it rose by this factor."""


def resident_peak(pids: Iterable[int]) -> int:
    """Bytes: the sum of VmHWM (proc_pid_status(5)) over those of the processes that live. What they share counts
    for each of them, so it may be above what was ever taken at once, never below."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) << 10
                    break
    return total


class Peaks:
    """`on_rise` is told the attempt and its peak in bytes."""

    def __init__(self, on_rise: Callable[[str, int], None]) -> None:
        self._on_rise = on_rise
        self._peaks: dict[str, int] = {}

    def all(self) -> dict[str, int]:
        return dict(self._peaks)

    def sample(self, attempt_id: str, pids: Collection[int]) -> None:
        peak = resident_peak(pids)
        if peak > self._peaks.get(attempt_id, 0) * RISE:
            self._peaks[attempt_id] = peak
            self._on_rise(attempt_id, peak)

    def forget(self, attempt_id: str) -> None:
        self._peaks.pop(attempt_id, None)
