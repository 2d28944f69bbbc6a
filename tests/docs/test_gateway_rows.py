"""Each fault that other gateways' users reported has a test that plays it from a socket to a real engine's process."""

from __future__ import annotations

import pytest

from support.named import TESTS, named_for

FROM_END_TO_END = (
    "contract/test_openai.py",
    "integration/test_gateway.py",
    "integration/test_gateway_requests.py",
    "integration/test_gateway_streams.py",
)
"""Whose requests all go through a controller, an executor and a sandbox."""
ROWS = {
    "G1": "an engine that ends between two events: one error, no false success",
    "G2": "an engine that ends inside an event: the connection breaks, nothing is added",
    "G3": "a fault that an engine reports inside its stream, in whatever form: one shape",
    "G4": "a request for a stream that the engine refuses: a plain status",
    "G5": "every form of event that the standard allows passes as it is",
    "G6": "characters that arrive in parts are whole",
    "G7": "one event of megabytes passes, without being held",
    "G8": "usage that nobody asked for is counted and not shown",
    "G9": "a client that leaves: the engine is left, its neighbours are not",
    "G10": "a stream that nobody reads is held nowhere",
    "G11": "a first token that is long in coming: comments, until the deadline",
    "G12": "a preflight needs no credentials",
    "G13": "compressed bodies, and small ones that unpack to large ones",
    "G14": "nothing gathers a stream",
    "G15": "bodies of doubtful length",
    "G16": "bodies over the limit are refused unread",
    "G17": "no header of a client reaches the engine",
    "G18": "a full queue says when to come back",
    "G19": "every error has the one shape",
    "G20": "what is no JSON is refused with its place, and no engine sees it",
    "G21": "stream is a boolean or null",
    "G22": "members that say nothing here reach the engine unchanged",
    "G23": "the newer name of the limit of tokens",
    "G24": "tool calls, reasoning, several choices and logprobs are untouched",
    "G25": "every form of input for embeddings",
    "G26": "a thousand aborts leave nothing in flight, and a record each",
    "G27": "a replica that stands still delays only its own requests",
    "G28": "what an engine may have seen is never sent again",
    "G29": "secrets are left nowhere",
    "G30": "without a database streams go on, and nobody is taken for a stranger",
}


@pytest.fixture(scope="module")
def claims() -> dict[str, list[str]]:
    """By row: the tests from end to end whose name or description has it."""
    return named_for(ROWS, [TESTS / module for module in FROM_END_TO_END])


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_held_by_a_test_from_end_to_end(claims: dict[str, list[str]], row: str) -> None:
    assert claims[row], f"no test from a socket to an engine is named for {row}: {ROWS[row]}"
