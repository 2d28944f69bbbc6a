"""What the machine has, and what of it is free now. Everything is read, nothing remembered."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

from ficc.domain.plan import Limits
from ficc.executor.cgroups import Group

PROCESSES_SHARE = 2
"""A half of what the kernel allows goes to attempts, the rest stays the machine's own."""
STORAGE_SHARE = 2
"""Scratch space is memory (tmpfs): at most half of the memory may be promised as storage."""
STORAGE_INODES = 1 << 20


def capacity(reserve_memory_bytes: int, ceiling: Mapping[str, int]) -> Limits:
    """What this machine can give to attempts in all: what it has, under the ceiling that holds for the
    executor itself (`Tree.ceiling`). GPUs are not offered by this release."""
    info = _meminfo()

    def within(name: str, amount: int) -> int:
        return min(amount, ceiling.get(name, amount))

    memory = max(0, within("memory_bytes", info["MemTotal"]) - reserve_memory_bytes)
    processes = within("processes", min(_sysctl("pid_max"), _sysctl("threads-max")))
    return Limits(
        cpu_millis=within("cpu_millis", len(os.sched_getaffinity(0)) * 1000),
        memory_bytes=memory,
        swap_bytes=info["SwapTotal"],
        processes=processes // PROCESSES_SHARE,
        storage_bytes=memory // STORAGE_SHARE,
        storage_inodes=STORAGE_INODES,
    )


def free(total: Limits, attempts: Iterable[tuple[Limits, Group]]) -> Limits:
    """What is free by measurement, before reservations: memory that nobody uses, less what admitted
    attempts may still come to use."""
    info = _meminfo()
    owed = 0
    for limits, group in attempts:
        try:
            used = group.memory_bytes()
        except OSError:  # its group is not made yet, or gone already
            used = 0
        owed += max(0, limits.memory_bytes - used)
    return Limits(
        cpu_millis=total.cpu_millis,
        memory_bytes=max(0, min(total.memory_bytes, info["MemAvailable"] - owed)),
        swap_bytes=min(total.swap_bytes, info["SwapFree"]),
        processes=total.processes,
        storage_bytes=total.storage_bytes,
        storage_inodes=total.storage_inodes,
        gpu_devices=total.gpu_devices,
    )


def identity() -> str | None:
    """What tells this machine from others: a digest of its machine-id(5), which is to stay with the machine. None
    where it has none."""
    try:
        found = Path("/etc/machine-id").read_text().strip()
    except OSError:
        return None
    return hashlib.sha256(f"ficc {found}".encode()).hexdigest() if len(found) == 32 else None


def description() -> dict[str, str]:
    return {
        "hostname": platform.node(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "processor": _processor(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _meminfo() -> dict[str, int]:
    """In bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(amount) * 1024 for name, amount, *_ in lines}


def _sysctl(name: str) -> int:
    return int((Path("/proc/sys/kernel") / name).read_text())
