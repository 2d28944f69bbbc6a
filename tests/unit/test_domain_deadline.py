"""L14: a deadline of the wall clock, judged by a clock that does not jump."""

from __future__ import annotations

import pytest

from ficc.domain.deadline import SECOND, see

LENGTH = 60.0


@pytest.mark.parametrize(
    ("seen_at", "left"),
    [
        (1000.0, 60),  # at its beginning
        (1030.0, 30),  # by a controller that started meanwhile
        (1060.0, 0),
        (4600.0, 0),  # the wall clock jumped ahead before anybody saw it
        (-2600.0, 60),  # or back: it begins anew, and is no longer than it ever was
    ],
)
def test_what_is_left_of_a_deadline(seen_at: float, left: float) -> None:
    seen = see(1060.0, LENGTH, seen_at, 5 * SECOND)
    assert seen.due_ns == (5 + left) * SECOND
