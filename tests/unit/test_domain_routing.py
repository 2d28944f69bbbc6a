"""Routing: the least loaded replica that has room, ties spread over turns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.routing import Candidate, pick


def candidates(*in_flight: int, concurrency: int = 4) -> list[Candidate]:
    return [Candidate(chr(ord("a") + n), count, concurrency) for n, count in enumerate(in_flight)]


def test_the_least_in_flight_takes_the_request_whatever_the_turn() -> None:
    for turn in range(7):
        assert pick(candidates(3, 1, 2), turn=turn) == "b"


def test_ties_take_turns() -> None:
    taken = Counter(pick(candidates(0, 0, 0), turn=turn) for turn in range(30))
    assert taken == {"a": 10, "b": 10, "c": 10}
    assert {pick(candidates(1, 0, 0), turn=turn) for turn in range(6)} == {"b", "c"}


def test_a_full_replica_takes_nothing() -> None:
    assert pick(candidates(4, 4), turn=0) is None
    assert pick(candidates(4, 3), turn=0) == "b"
    mixed = [Candidate("a", 1, 1), Candidate("b", 2, 4)]
    assert pick(mixed, turn=0) == "b"


def test_an_excluded_replica_takes_nothing() -> None:
    assert pick(candidates(0, 3), turn=0, without={"a"}) == "b"
    assert pick(candidates(0, 3), turn=0, without={"a", "b"}) is None


def test_no_replica_no_route() -> None:
    assert pick([], turn=5) is None


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=6),
    st.integers(0, 10**9),
    st.sets(st.sampled_from("abcdef")),
)
def test_the_choice_has_room_and_nobody_has_less(
    loads: list[tuple[int, int]], turn: int, without: set[str]
) -> None:
    several = [Candidate("abcdef"[n], count, most) for n, (count, most) in enumerate(loads)]
    usable = [c for c in several if c.in_flight < c.concurrency and c.attempt_id not in without]
    chosen = pick(several, turn=turn, without=without)
    if not usable:
        assert chosen is None
    else:
        least = min(c.in_flight for c in usable)
        assert chosen in {c.attempt_id for c in usable if c.in_flight == least}
