"""How a request ended, and how its tokens are to be read, from how far it came."""

from __future__ import annotations

import pytest

from ficc.domain.errors import Refused
from ficc.domain.usage import Counted, Outcome, Progress, Tokens, outcome_of, tokens_of

TOLD = Tokens(7, 3)
ZERO = Tokens(0, 0)
NOBODY_KNOWS = Tokens(None, None)


def why(code: str) -> Refused:
    return Refused(code, "For a reason.")


TABLE = [
    # what ended it, how far it came, outcome and code, how tokens are counted, tokens
    (None, Progress(True, 200, True, None, TOLD), "completed", None, "counted", TOLD),
    (None, Progress(True, 200, True, None, ZERO), "completed", None, "counted", ZERO),
    (None, Progress(True, 200, True, None, None), "completed", None, "unknown", NOBODY_KNOWS),
    (None, Progress(True, 200, True, 9, None), "completed", None, "unknown", NOBODY_KNOWS),
    (None, Progress(True, 200, False, 9, None), "client_gone", "client_gone", "partial", Tokens(None, 9)),
    ("client_gone", Progress(), "client_gone", "client_gone", "none", ZERO),
    ("client_gone", Progress(True), "client_gone", "client_gone", "unknown", NOBODY_KNOWS),
    ("client_gone", Progress(True, 200, False, 0), "client_gone", "client_gone", "partial", Tokens(None, 0)),
    ("client_gone", Progress(True, 200, False, 5, TOLD), "client_gone", "client_gone", "partial", TOLD),
    ("queue_full", Progress(), "refused", "queue_full", "none", ZERO),
    ("deadline_exceeded", Progress(), "refused", "deadline_exceeded", "none", ZERO),
    ("deadline_exceeded", Progress(True, 200, False, 4), "failed", "deadline_exceeded", "partial", Tokens(None, 4)),
    ("peer_lost", Progress(True), "failed", "peer_lost", "unknown", NOBODY_KNOWS),
    ("engine_error", Progress(True, 200, False, 0), "failed", "engine_error", "partial", Tokens(None, 0)),
    ("unauthenticated", Progress(True, 200, False, 2), "failed", "unauthenticated", "partial", Tokens(None, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "progress", "outcome", "said", "counted", "tokens"), TABLE)
def test_how_it_ended_and_what_it_took(
    code: str | None, progress: Progress, outcome: str, said: str | None, counted: str, tokens: Tokens
) -> None:
    found = outcome_of(None if code is None else why(code), progress)
    assert found == (Outcome(outcome), said)
    assert tokens_of(found[0], progress) == (Counted(counted), tokens)
