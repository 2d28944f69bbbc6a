"""An upload: how the bytes of one file become durable and proved, in order, by one writer at a time.

The offset counts durable bytes only. A piece is admitted at exactly that offset; an empty piece is
admitted only at the full size, where it finishes what an interruption left unverified. The same record
serves acquisition: whoever brings the bytes, the file's states are these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ficc.domain.errors import Reason, Refused
from ficc.domain.lifecycle import next_state

JSON_BYTES_MAX = 1 << 20
"""Decoded bytes of one JSON upload."""
OCTET_STREAM_BYTES_MAX = 16 << 20
OCTET_STREAMS_MAX = 2
"""Octet-stream uploads active at once in the installation."""


class State(StrEnum):
    MISSING = "missing"
    PARTIAL = "partial"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Write:
    """`length` bytes at the record's offset are durable; they end at the declared size at most."""

    length: int


@dataclass(frozen=True, slots=True)
class Verify:
    """Every byte is there; the hash is being taken."""


@dataclass(frozen=True, slots=True)
class Match:
    """Size and hash are right, and the blob is published."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    actual: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Verification ended without a verdict (a crash, a full disk)."""


@dataclass(frozen=True, slots=True)
class Shorten:
    """Fewer bytes than recorded were found on disk."""

    offset: int


@dataclass(frozen=True, slots=True)
class Restart:
    """What is there cannot be continued, or was found wrong and is fetched once more: from 0 again."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Retry:
    """An operator wants a file that failed to be fetched anew."""


@dataclass(frozen=True, slots=True)
class Lose:
    """The published file is gone, or is not what it was: somebody else removed or damaged it."""

    reason: Reason


Event = Write | Verify | Match | Mismatch | Interrupt | Shorten | Restart | Retry | Lose
EVENTS: tuple[type, ...] = (Write, Verify, Match, Mismatch, Interrupt, Shorten, Restart, Retry, Lose)

_S = State
TRANSITIONS: Mapping[tuple[State, type], State] = {
    (_S.MISSING, Write): _S.PARTIAL,
    (_S.MISSING, Verify): _S.VERIFYING,  # a file of no bytes
    (_S.PARTIAL, Write): _S.PARTIAL,
    (_S.PARTIAL, Verify): _S.VERIFYING,
    (_S.PARTIAL, Shorten): _S.PARTIAL,
    (_S.PARTIAL, Restart): _S.PARTIAL,
    (_S.FAILED, Write): _S.PARTIAL,
    (_S.FAILED, Verify): _S.VERIFYING,
    (_S.FAILED, Retry): _S.MISSING,
    (_S.VERIFYING, Match): _S.VERIFIED,
    (_S.VERIFYING, Mismatch): _S.FAILED,
    (_S.VERIFYING, Interrupt): _S.PARTIAL,
    (_S.VERIFYING, Shorten): _S.PARTIAL,
    (_S.VERIFYING, Restart): _S.PARTIAL,
    (_S.VERIFIED, Lose): _S.MISSING,
}


@dataclass(frozen=True, slots=True)
class Record:
    """One file of one project: its declared size and digest, and how far it has come."""

    sha256: str
    bytes: int
    offset: int = 0
    state: State = State.MISSING
    error: Reason | None = None


def advance(record: Record, event: Event) -> Record:
    """The record after the event. The offset only ever falls together with an error that says why; a partial
    keeps it until it is proved, what failed until its next piece.

    Raises IllegalTransition, and ValueError for an event that does not fit the record's offset.
    """
    after = replace(record, state=next_state(TRANSITIONS, record.state, event))
    kept = record.error if record.state is State.PARTIAL else None
    match event:
        case Write(length):
            if not 0 <= length <= record.bytes - record.offset:
                raise ValueError(f"{length} bytes at {record.offset} of {record.bytes}")
            return replace(after, offset=record.offset + length, error=kept)
        case Verify():
            if record.offset != record.bytes:
                raise ValueError(f"only {record.offset} of {record.bytes} bytes are there to be verified")
            return replace(after, error=kept)
        case Mismatch(actual):
            return replace(after, offset=0, error=mismatch_reason(record.sha256, actual))
        case Shorten(offset):
            if not 0 <= offset < record.offset:
                raise ValueError(f"{offset} is not below the recorded offset {record.offset}")
            error = Reason(
                "partial_shortened", f"The file on disk ends at {offset}, before the recorded offset."
            )
            return replace(after, offset=offset, error=error)
        case Restart(reason) | Lose(reason):
            return replace(after, offset=0, error=reason)
        case Match() | Retry():
            return replace(after, error=None)
        case Interrupt():
            return after


MISMATCH = "source_mismatch"


def was_mismatch(record: Record) -> bool:
    """Whether the bytes began again at 0 because a whole file of them was wrong."""
    return record.error is not None and record.error.code == MISMATCH


def mismatch_reason(expected: str, actual: str) -> Reason:
    return Reason(
        MISMATCH,
        f"The bytes hash to {actual}, but the manifest declares {expected}. The file starts again at offset 0.",
    )


@dataclass(frozen=True, slots=True)
class Append:
    """Write at the record's offset."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing to write: verify and publish what is there."""


@dataclass(frozen=True, slots=True)
class AlreadyVerified:
    """Nothing to do: answer with the record."""


def admit(record: Record, offset: int, length: int) -> Append | Finish | AlreadyVerified:
    """What a piece of `length` bytes at `offset` does.

    Raises Refused, always with the durable offset: `model_busy` while the file is being verified,
    `empty_upload` for an empty piece that finishes nothing, `offset_mismatch`, and `invalid_request` past
    the declared size.
    """
    if record.state is State.VERIFYING:
        raise Refused(
            "model_busy",
            "The file is being verified; read the model and send nothing until it is verified or failed.",
            retry_after_seconds=1,
            beside={"offset": record.offset},
        )
    if length == 0:
        if not offset == record.offset == record.bytes:
            raise Refused(
                "empty_upload",
                f"An empty upload finishes a file whose {record.bytes} bytes are all durable, at that offset; "
                f"{record.offset} are, so send from there.",
                beside={"offset": record.offset},
            )
        return AlreadyVerified() if record.state is State.VERIFIED else Finish()
    if offset != record.offset:
        raise Refused(
            "offset_mismatch",
            f"The durable offset is {record.offset}; send from there.",
            "offset",
            beside={"offset": record.offset},
        )
    if offset + length > record.bytes:
        raise Refused(
            "invalid_request",
            f"The file declares {record.bytes} bytes; {length} bytes at {offset} go past its end.",
            "data",
            beside={"offset": record.offset},
        )
    return Append()
