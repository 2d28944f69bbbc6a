"""The clock of leases: CLOCK_BOOTTIME with the machine's boot id. It counts while the machine sleeps."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
