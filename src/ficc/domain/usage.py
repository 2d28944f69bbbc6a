"""What is kept of one inference request: who asked, what answered, how it ended, and what it took.

Zero tokens are a count; a count that nobody gave is None.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ficc.domain.errors import Refused

SECONDS_PER_DAY = 86_400
HELD_RECORDS_MAX = 100_000
"""That wait for a database that is away; about 600 bytes each."""
TOKENS_MAX = 2**53 - 1
"""A count above this is no count."""


class Outcome(StrEnum):
    COMPLETED = "completed"
    """The answer was whole."""
    REFUSED = "refused"
    """No answer was begun and no token was computed: refused here, or by the engine. `code` says why."""
    FAILED = "failed"
    """An engine had the request, or may have had it, and the answer broke off. `code` says why."""
    CLIENT_GONE = "client_gone"
    """The caller left before the answer was whole."""


class Counted(StrEnum):
    """How the numbers of tokens are to be read."""

    COUNTED = "counted"
    """By the engine, for the whole answer."""
    PARTIAL = "partial"
    """Of an answer that broke off: the engine's last word or, without one, the events that passed."""
    UNKNOWN = "unknown"
    """The engine did not tell."""
    NONE = "none"
    """No engine computed anything."""


class Tokens(NamedTuple):
    """As an engine counts them."""

    prompt: int | None
    completion: int | None


class Record(NamedTuple):
    """One request. `id` is that of the invocation: a ULID of when it began, and unique, which `request_id`, the
    caller's own choice, is not. Of a request that never reached a replica, what tells of the replica is None."""

    id: str
    request_id: str
    project_id: str
    service_id: str | None
    alias: str | None
    authority_kind: str
    authority_id: str
    subject_id: str
    path: str
    outcome: Outcome
    code: str | None
    status: int
    day: int
    """Days since 1970-01-01, UTC, on which it began."""
    started_at: float
    queue_ms: float
    first_byte_ms: float | None
    total_ms: float
    tokens: Counted
    prompt_tokens: int | None
    completion_tokens: int | None
    model_revision: str | None
    plan_digest: str | None
    generation: int | None
    attempt_id: str | None
    requests: int = 1
    """Refusals of one kind that come in a flood are kept as one record with their number."""


class Progress(NamedTuple):
    """How far a request came. `computing`: an engine has it, or may have it; `status`: the answer's, once there is
    one; `passed`: the events of a stream that went out; `told`: what the engine said it counted."""

    computing: bool = False
    status: int | None = None
    whole: bool = False
    passed: int | None = None
    told: Tokens | None = None


def outcome_of(why: Refused | None, progress: Progress) -> tuple[Outcome, str | None]:
    """How a request ended that came so far, and the code of what ended it."""
    if why is None:
        return (Outcome.COMPLETED, None) if progress.whole else (Outcome.CLIENT_GONE, "client_gone")
    if why.code == "client_gone":
        return Outcome.CLIENT_GONE, why.code
    return (Outcome.FAILED if progress.computing else Outcome.REFUSED), why.code


def tokens_of(outcome: Outcome, progress: Progress) -> tuple[Counted, Tokens]:
    """What is recorded of tokens."""
    if outcome is Outcome.REFUSED or not progress.computing:
        return Counted.NONE, Tokens(0, 0)
    if progress.told is not None:
        counted = Counted.COUNTED if progress.whole else Counted.PARTIAL
        return counted, progress.told
    if outcome is not Outcome.COMPLETED and progress.passed is not None:
        return Counted.PARTIAL, Tokens(None, progress.passed)
    return Counted.UNKNOWN, Tokens(None, None)
