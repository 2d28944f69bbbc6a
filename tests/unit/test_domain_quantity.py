"""Numbers for people."""

from __future__ import annotations

import pytest

from ficc.domain.quantity import amount, size


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_501, "1.0 MB"),
        (1_500_000, "1.5 MB"),
        (98_362_432, "98.4 MB"),
        (999_949_999, "999.9 MB"),
        (999_950_001, "1.0 GB"),
        (2_147_483_648, "2.1 GB"),
        (10**12, "1.0 TB"),
        (10**16, "10000.0 TB"),
    ],
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(
    ("limit", "count", "shown"),
    [
        ("cpu_millis", 0, "0 cores"),
        ("cpu_millis", 250, "0.25 cores"),
        ("cpu_millis", 1000, "1 core"),
        ("cpu_millis", 12_500, "12.5 cores"),
        ("memory_bytes", 1_500_000, "1.5 MB"),
        ("processes", 64, "64"),
    ],
)
def test_amounts_of_limits(limit: str, count: int, shown: str) -> None:
    assert amount(limit, count) == shown
