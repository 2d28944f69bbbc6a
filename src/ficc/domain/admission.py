"""Admission of a request: take a slot, wait in a bounded queue, or be refused at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ficc.domain.errors import Refused
from ficc.domain.routing import Candidate, pick
from ficc.domain.service import ENDED, ROUTABLE, State

RETRY_AFTER_SECONDS = 1
QUEUE_MAX = 64
"""Requests that wait for a slot of one service, unless the operator says otherwise."""
QUEUE_SECONDS = 30.0
"""How long one waits."""
KEEP_ALIVE_SECONDS = 15.0
"""How long a stream's client hears nothing before it is sent a comment: well below the minute after which proxies give
a connection up."""
BODY_BYTES_TOTAL_MAX = 256 << 20
"""Of all request bodies that are held at once."""


@dataclass(frozen=True, slots=True)
class Take:
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Wait:
    pass


def decide(
    candidates: Sequence[Candidate],
    *,
    waiting: int,
    queue_max: int,
    turn: int,
    without: Collection[str] = (),
) -> Take | Wait:
    """Where a request goes. Those that already wait go first, so a free slot is taken only by the queue's
    head (`waiting` counts those ahead). Raises Refused `queue_full`."""
    if waiting == 0:
        attempt_id = pick(candidates, turn=turn, without=without)
        if attempt_id is not None:
            return Take(attempt_id)
    if waiting >= queue_max:
        raise Refused(
            "queue_full",
            f"Every slot is taken and {waiting} requests wait already; try again later.",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    return Wait()


_STOPPED = {
    State.STOPPING: "The service is being stopped; start it again once it has.",
    State.STOPPED: "The service is stopped; start it to go on.",
    State.FAILED: "The service has failed; its record says why. Start it again when that is mended.",
}


def check_state(state: State) -> None:
    """Whether a service in this state takes requests. Raises Refused: `service_stopped` where waiting is in vain,
    `service_draining` and `service_not_ready` where it is not."""
    if state in ROUTABLE:
        return
    if state is State.DRAINING:
        raise Refused(
            "service_draining",
            "The service finishes what it has and takes no new requests.",
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    if state in ENDED or state is State.STOPPING:
        raise Refused("service_stopped", _STOPPED[state])
    raise Refused(
        "service_not_ready",
        f"The service is {state}; no replica takes requests.",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )
