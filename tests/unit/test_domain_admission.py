"""Admission: a slot, a place in a bounded queue, or a refusal at once."""

from __future__ import annotations

import pytest

from ficc.domain.admission import Take, Wait, check_state, decide
from ficc.domain.errors import Refused
from ficc.domain.routing import Candidate
from ficc.domain.service import State

FREE, FULL = [Candidate("a", 0, 1)], [Candidate("a", 1, 1)]


def test_a_free_slot_is_taken() -> None:
    assert decide(FREE, waiting=0, queue_max=0, turn=0) == Take("a")


def test_nobody_overtakes_those_who_wait() -> None:
    assert decide(FREE, waiting=1, queue_max=2, turn=0) == Wait()


@pytest.mark.parametrize("waiting", [0, 1])
def test_g18_the_queue_takes_as_many_as_its_limit(waiting: int) -> None:
    assert decide(FULL, waiting=waiting, queue_max=2, turn=0) == Wait()


@pytest.mark.parametrize(("waiting", "queue_max"), [(2, 2), (3, 2), (0, 0)])
def test_g18_one_past_the_limit_is_refused_with_a_time_to_come_back(waiting: int, queue_max: int) -> None:
    with pytest.raises(Refused) as caught:
        decide(FULL, waiting=waiting, queue_max=queue_max, turn=0)
    assert caught.value.code == "queue_full"
    assert caught.value.retry_after_seconds == 1


def test_an_excluded_replica_is_as_good_as_full() -> None:
    assert decide(FREE, waiting=0, queue_max=1, turn=0, without={"a"}) == Wait()


def test_a_service_without_replicas_lets_wait_too() -> None:
    assert decide([], waiting=0, queue_max=1, turn=0) == Wait()


@pytest.mark.parametrize("state", State)
def test_which_states_take_requests(state: State) -> None:
    if state in (State.READY, State.DEGRADED):
        check_state(state)
        return
    with pytest.raises(Refused) as caught:
        check_state(state)
    if state in (State.STOPPING, State.STOPPED, State.FAILED):  # asking again would be in vain
        assert caught.value.code == "service_stopped"
        assert caught.value.retry_after_seconds is None
        return
    assert caught.value.code == ("service_draining" if state is State.DRAINING else "service_not_ready")
    assert caught.value.retry_after_seconds
