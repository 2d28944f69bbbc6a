"""Turns: callers are served in rounds."""

from __future__ import annotations

import random

import pytest

from ficc.domain.turns import Turns


def served(turns: Turns) -> str:
    """Everybody's caller, in the order of serving."""
    order = ""
    while (turn := turns.first) is not None:
        turns.leave(turn, served=True)
        order += turn.caller
    return order


@pytest.mark.parametrize(
    ("came", "order"),
    [
        ("", ""),
        ("aaa", "aaa"),
        ("abc", "abc"),
        ("aaab", "abaa"),
        ("aaabbc", "abcaba"),
        ("abab", "abab"),
        ("aaaaabb", "ababaaa"),
    ],
)
def test_callers_take_turns(came: str, order: str) -> None:
    turns = Turns()
    for caller in came:
        turns.join(caller)
    assert len(turns) == len(came)
    assert served(turns) == order


def test_who_comes_later_neither_waits_for_all_nor_makes_up_for_its_absence() -> None:
    turns = Turns()
    for _ in range(5):
        turns.join("a")
    for _ in range(3):
        first = turns.first
        assert first is not None
        turns.leave(first, served=True)
    for _ in range(3):
        turns.join("b")
    assert served(turns) == "abab" + "b"


def test_one_that_leaves_unserved_moves_no_other() -> None:
    turns = Turns()
    turns.join("a")
    gone = turns.join("a")
    turns.join("a")
    turns.join("b")
    turns.leave(gone, served=False)
    turns.leave(gone, served=False)
    assert served(turns) == "aba"


@pytest.mark.parametrize(
    ("came", "caller", "displaced"),
    [("aaa", "b", "a"), ("aaa", "a", None), ("ab", "c", None), ("aab", "c", "a"), ("", "a", None), ("abab", "a", None)],
)  # fmt: skip
def test_in_a_full_queue_the_last_of_many_gives_way(came: str, caller: str, displaced: str | None) -> None:
    turns = Turns()
    for one in came:
        turns.join(one)
    found = turns.displaced_by(caller)
    assert (found.caller if found else None) == displaced
    if found is not None:
        turns.leave(found, served=False)
        assert len(turns) == len(came) - 1
        turns.join(caller)
        assert caller in served(turns)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_served_twice_while_another_waits_through_both(seed: int) -> None:
    """A caller with one request waits for at most one of each other caller's that wait."""
    luck, turns = random.Random(seed), Turns()
    for _ in range(50):
        turns.join(luck.choice("abc"))
    turns.join("z")
    before = served(turns).index("z")
    assert before <= 3
