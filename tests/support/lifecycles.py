"""What is the same about every lifecycle's tests: the whole product of states and events, and the graph that
the table is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import pytest

S = TypeVar("S", bound=StrEnum)
Table = Mapping[tuple[S, type], S]


def product(states: Iterable[StrEnum], events: Iterable[object]) -> list[Any]:
    """Every state with every event, as parameters of a test."""
    events = list(events)
    return [
        pytest.param(state, event, id=f"{state.value}-{type(event).__name__}")
        for state in states
        for event in events
    ]


def reachable(table: Table[S], start: S) -> set[S]:
    """Every state that some sequence of events leads to."""
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (before, _), after in table.items():
            if before is state and after not in found:
                found.add(after)
                todo.append(after)
    return found


def final(table: Table[S], states: Iterable[S]) -> set[S]:
    """States that nothing leads out of."""
    return set(states) - {before for (before, _), after in table.items() if before is not after}


def ways_into(table: Table[S], state: S) -> set[tuple[S, type]]:
    """Each state and event from which this one is entered."""
    return {way for way, after in table.items() if after is state and way[0] is not state}
