"""What the lifecycles share: a table from (state, kind of event) to the next state.

Each lifecycle module owns its `State`, its event classes and its `TRANSITIONS`; this one only looks up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

S = TypeVar("S", bound=StrEnum)


class IllegalTransition(Exception):
    """An event that the state does not admit: a fault of the caller of `advance`, never of a user."""

    def __init__(self, state: StrEnum, event: object) -> None:
        super().__init__(f"{type(event).__name__} is not legal in state {state.value!r}")
        self.state = state
        self.event = event


def next_state(table: Mapping[tuple[S, type], S], state: S, event: object) -> S:
    """The state after the event. Raises IllegalTransition when the table has no such entry."""
    try:
        return table[state, type(event)]
    except KeyError:
        raise IllegalTransition(state, event) from None


def diagram(table: Mapping[tuple[S, type], S]) -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2"]
    arrows: dict[tuple[S, S], list[str]] = {}
    for (state, event), after in table.items():
        arrows.setdefault((state, after), []).append(event.__name__)
    for (state, after), events in arrows.items():
        lines.append(f"    {state.value} --> {after.value}: {', '.join(events)}")
    return "\n".join(lines)
