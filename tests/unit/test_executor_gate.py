"""What a closed gate keeps of those that it refuses."""

from __future__ import annotations

import traceback

import pytest

from ficc.domain.errors import Refused
from ficc.domain.plan import Endpoint, Fence
from ficc.executor.endpoint import Gate


def unreachable() -> int:
    raise AssertionError("nothing connects through a closed gate")


def test_a_closed_gate_keeps_nothing_of_whom_it_refused() -> None:
    """It has one reason for all; an exception keeps the frames of whatever it is raised through, each time."""
    fence = Fence("attempt", 1, "digest")
    gate = Gate(fence, Endpoint("unix", "/run/ficc/engine.sock", (("POST", "/a"),), 1000, 1), unreachable)
    why = Refused("service_not_ready", "The engine ended.")
    gate.admit_no_more(why)
    frames = []
    for _ in range(3):
        with pytest.raises(Refused) as caught:
            gate.check(fence)
        assert caught.value is why
        frames.append(len(traceback.extract_tb(why.__traceback__)))
    assert len(set(frames)) == 1
