"""The pulse of an engine: what counts as a word of it, and for how long requests have waited for one."""

from __future__ import annotations

import pytest

from ficc.executor import pulse as module
from ficc.executor.pulse import Pulse


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_nobody_waits_where_nothing_was_asked(clock: Clock) -> None:
    assert Pulse().waiting_seconds([]) == 0.0


def test_requests_wait_since_the_first_of_them_or_since_the_last_word(clock: Clock) -> None:
    pulse = Pulse()
    assert pulse.waiting_seconds([90.0, 95.0]) == 10.0
    pulse.hear(b'data: {"choices"')
    assert pulse.waiting_seconds([90.0, 95.0]) == 0.0
    clock.now = 130.0
    assert pulse.waiting_seconds([90.0, 95.0]) == 30.0
    assert pulse.waiting_seconds([]) == 0.0


def test_a_comment_is_no_word_of_the_engine(clock: Clock) -> None:
    """Its HTTP server sends them while it hangs."""
    pulse = Pulse()
    pulse.hear(b": ping\n\n")
    assert pulse.waiting_seconds([90.0]) == 10.0
    assert not pulse.heard_since(0.0)


def test_who_gave_up_without_a_word_counts_until_the_engine_is_heard_again(clock: Clock) -> None:
    pulse = Pulse()
    pulse.end(90.0)
    pulse.end(96.0)
    assert pulse.waiting_seconds([]) == pulse.waiting_seconds([98.0]) == 10.0
    pulse.hear(b"{")
    assert pulse.waiting_seconds([]) == 0.0
    clock.now = 110.0
    pulse.end(105.0)
    assert pulse.waiting_seconds([]) == 5.0


def test_who_heard_something_and_left_has_nothing_to_complain_of(clock: Clock) -> None:
    pulse = Pulse()
    pulse.hear(b"data: 1\n\n")
    clock.now = 160.0
    pulse.end(90.0)
    assert pulse.waiting_seconds([]) == 0.0
