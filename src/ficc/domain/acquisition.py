"""The acquisition of a model: from registered to ready, by download or by upload.

The worker itself reports `Settle` after its last durable write; only then is an acquisition paused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ficc.domain import upload
from ficc.domain.errors import Reason
from ficc.domain.lifecycle import next_state


class State(StrEnum):
    REGISTERED = "registered"
    ACQUIRING = "acquiring"
    PAUSING = "pausing"
    PAUSED = "paused"
    VERIFYING = "verifying"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Acquire:
    """An operator starts or resumes the download."""


@dataclass(frozen=True, slots=True)
class Pause:
    pass


@dataclass(frozen=True, slots=True)
class Settle:
    """The worker's last admitted write is durable, and it writes no more."""


@dataclass(frozen=True, slots=True)
class Supply:
    """A client uploaded a piece."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Of a model that is being downloaded, some bytes are still to come, or to come once more."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Every byte of every file is durable; at least one is still being hashed."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Every file is verified."""


@dataclass(frozen=True, slots=True)
class Fail:
    reason: Reason


@dataclass(frozen=True, slots=True)
class Lose:
    """A file of a ready model was lost: it is as if it had never been brought."""

    reason: Reason


Event = Acquire | Pause | Settle | Supply | Proceed | Verify | Complete | Fail | Lose
EVENTS: tuple[type, ...] = (Acquire, Pause, Settle, Supply, Proceed, Verify, Complete, Fail, Lose)

_S = State
TRANSITIONS: Mapping[tuple[State, type], State] = {
    (_S.REGISTERED, Acquire): _S.ACQUIRING,
    (_S.REGISTERED, Supply): _S.REGISTERED,
    (_S.REGISTERED, Verify): _S.VERIFYING,
    (_S.REGISTERED, Complete): _S.READY,
    (_S.REGISTERED, Fail): _S.FAILED,
    (_S.ACQUIRING, Acquire): _S.ACQUIRING,
    (_S.ACQUIRING, Pause): _S.PAUSING,
    (_S.ACQUIRING, Supply): _S.ACQUIRING,
    (_S.ACQUIRING, Proceed): _S.ACQUIRING,
    (_S.ACQUIRING, Verify): _S.VERIFYING,
    (_S.ACQUIRING, Complete): _S.READY,
    (_S.ACQUIRING, Fail): _S.FAILED,
    (_S.PAUSING, Pause): _S.PAUSING,
    (_S.PAUSING, Settle): _S.PAUSED,
    (_S.PAUSING, Supply): _S.PAUSING,
    (_S.PAUSING, Verify): _S.VERIFYING,  # the last write was the last one there was: nothing to pause
    (_S.PAUSING, Complete): _S.READY,
    (_S.PAUSING, Fail): _S.FAILED,
    (_S.PAUSED, Acquire): _S.ACQUIRING,
    (_S.PAUSED, Pause): _S.PAUSED,
    (_S.PAUSED, Supply): _S.PAUSED,
    (_S.PAUSED, Verify): _S.VERIFYING,
    (_S.PAUSED, Complete): _S.READY,
    (_S.PAUSED, Fail): _S.FAILED,
    (_S.VERIFYING, Acquire): _S.VERIFYING,
    (_S.VERIFYING, Verify): _S.VERIFYING,
    (_S.VERIFYING, Complete): _S.READY,
    (_S.VERIFYING, Fail): _S.FAILED,
    (_S.VERIFYING, Supply): _S.REGISTERED,
    (_S.VERIFYING, Proceed): _S.ACQUIRING,
    (_S.READY, Acquire): _S.READY,
    (_S.READY, Complete): _S.READY,
    (_S.READY, Lose): _S.REGISTERED,
    (_S.FAILED, Acquire): _S.ACQUIRING,
    (_S.FAILED, Supply): _S.REGISTERED,
    (_S.FAILED, Verify): _S.VERIFYING,
    (_S.FAILED, Complete): _S.READY,
    (_S.FAILED, Fail): _S.FAILED,
}


FETCHING = frozenset({_S.ACQUIRING, _S.VERIFYING})


@dataclass(frozen=True, slots=True)
class Record:
    """`fetching`: somebody asked for the download, and has not paused it since. It survives a crash, so a
    download goes on wherever it was, also while its last bytes were being hashed."""

    state: State = State.REGISTERED
    error: Reason | None = None
    fetching: bool = False


def advance(record: Record, event: Event) -> Record:
    """The record after the event. Raises IllegalTransition."""
    error = event.reason if isinstance(event, (Fail, Lose)) else None
    state = next_state(TRANSITIONS, record.state, event)
    fetching = state in FETCHING and (record.fetching or isinstance(event, Acquire))
    return replace(record, state=state, error=error, fetching=fetching)


def event_of_files(record: Record, files: Sequence[upload.Record], *, supplied: bool) -> Event:
    """What the files of a model amount to after one of them changed. `supplied`: by an upload."""
    states = [file.state for file in files]
    if all(state is upload.State.VERIFIED for state in states):
        return Complete()
    if record.state is State.READY:
        lost = next(file for file in files if file.state is not upload.State.VERIFIED)
        return Lose(lost.error or Reason("content_lost", "A file of the model is no longer there."))
    for file in files:
        if file.state is upload.State.FAILED:
            return Fail(file.error or Reason("source_mismatch", "A file failed verification."))
    durable = (upload.State.VERIFYING, upload.State.VERIFIED)
    if all(state in durable for state in states):
        return Verify()
    if record.state is State.FAILED and record.error is not None and not supplied:
        return Fail(record.error)  # a file that still came to its end takes nothing back of why it failed
    return Proceed() if record.fetching else Supply()
