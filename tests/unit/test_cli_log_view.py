"""Following a log by its newest part alone: what is there twice is shown once, and nothing is left out."""

from __future__ import annotations

import pytest

from ficc.cli.log_view import OVERLAP_CHARACTERS, added

LONG = "".join(f"line {n}\n" for n in range(5000))


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ("", "", ""),
        ("", "one\n", "one\n"),
        ("one\n", "one\n", ""),
        ("one\n", "one\ntwo\n", "two\n"),
        ("one\none\n", "one\none\none\n", "one\n"),
        (LONG, LONG[1000:] + "more\n", "more\n"),  # the oldest was left out meanwhile
        (LONG, LONG[-OVERLAP_CHARACTERS:] + "more\n", "more\n"),
        (LONG, LONG[1 - OVERLAP_CHARACTERS :] + "more\n", LONG[1 - OVERLAP_CHARACTERS :] + "more\n"),
    ],
)
def test_what_was_said_since(before: str, after: str, more: str) -> None:
    assert added(before, after) == more
