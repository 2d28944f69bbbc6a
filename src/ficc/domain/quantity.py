"""Quantities as people read them, the same in every message, table and page."""

from __future__ import annotations

_UNITS = (("B", 0), ("kB", 0), ("MB", 1), ("GB", 1))  # each with its decimals


def size(count: int) -> str:
    """A number of bytes in powers of 1000: "999 B", "12 kB", "98.4 MB"."""
    amount = float(count)
    for unit, decimals in _UNITS:
        if round(amount, decimals) < 1000:
            return f"{amount:.{decimals}f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def amount(limit: str, count: int) -> str:
    """So much of a limit, by its name: 1500 of `cpu_millis` are "1.5 cores", other counts stay as they are."""
    if limit.endswith("_bytes"):
        return size(count)
    if limit == "cpu_millis":
        return "1 core" if count == 1000 else f"{count / 1000:g} cores"
    return str(count)
