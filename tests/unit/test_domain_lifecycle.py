"""The look-up that all lifecycles share, and the drawing of a table."""

from __future__ import annotations

from enum import StrEnum

import pytest

from ficc.domain.lifecycle import IllegalTransition, diagram, next_state


class Light(StrEnum):
    RED = "red"
    GREEN = "green"


class Go:
    pass


class Halt:
    pass


class Fade(Halt):
    pass


TABLE = {(Light.RED, Go): Light.GREEN, (Light.GREEN, Go): Light.GREEN, (Light.GREEN, Halt): Light.RED}


def test_the_next_state_is_what_the_table_says() -> None:
    assert next_state(TABLE, Light.RED, Go()) is Light.GREEN
    assert next_state(TABLE, Light.GREEN, Halt()) is Light.RED


def test_an_event_that_the_table_lacks_is_refused_by_name() -> None:
    event = Halt()
    with pytest.raises(IllegalTransition, match="Halt is not legal in state 'red'") as caught:
        next_state(TABLE, Light.RED, event)
    assert caught.value.state is Light.RED
    assert caught.value.event is event


def test_an_event_counts_as_its_own_class_only() -> None:
    with pytest.raises(IllegalTransition):
        next_state(TABLE, Light.GREEN, Fade())


def test_a_diagram_joins_the_events_between_two_states() -> None:
    table = {**TABLE, (Light.RED, Halt): Light.GREEN}
    assert diagram(table) == (
        "stateDiagram-v2\n    red --> green: Go, Halt\n    green --> green: Go\n    green --> red: Halt"
    )
