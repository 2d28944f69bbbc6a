"""What the command line makes of what was typed."""

from __future__ import annotations

import pytest

from ficc.cli.main import global_first
from ficc.cli.specification import default_cpu_millis


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("", ""),
        ("model list", "model list"),
        ("model list --quiet", "--quiet model list"),
        ("open --state-directory /x", "--state-directory /x open"),
        ("open --state-directory=/x --json", "--state-directory=/x open --json"),
        ("--debug up --listen h:1 --quiet", "--debug --quiet up --listen h:1"),
        ("chat a -- --quiet", "chat a -- --quiet"),
        ("--debug chat a -- --debug --state-directory", "--debug chat a -- --debug --state-directory"),
        ("open --state-directory", "open --state-directory"),
    ],
)
def test_options_of_all_commands_may_stand_anywhere(typed: str, read: str) -> None:
    assert global_first(typed.split()) == read.split()


@pytest.mark.parametrize(
    ("free_millis", "replicas", "each"),
    [
        (1000, 1, 1000),
        (2000, 1, 1000),
        (3000, 1, 1000),
        (8000, 1, 4000),
        (9500, 1, 4000),
        (8000, 4, 1000),
        (2000, 4, 250),
        (500, 1, 500),
        (0, 1, 1000),  # refused, with who holds the cores
        (0, 64, 15),
        (100, 64, 10),
    ],
)
def test_a_service_takes_half_of_the_free_cores_by_default(
    free_millis: int, replicas: int, each: int
) -> None:
    assert default_cpu_millis(free_millis, replicas) == each


def test_two_services_fit_beside_each_other_wherever_there_are_two_cores() -> None:
    for cores in range(2, 129):
        free = cores * 1000
        first = default_cpu_millis(free, 1)
        assert 1000 <= first <= free // 2
        assert 1000 <= default_cpu_millis(free - first, 1) <= free - first
