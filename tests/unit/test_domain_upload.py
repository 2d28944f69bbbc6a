"""One file of a model: its table, what a piece of it does, and an offset that only an error sets back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import upload
from ficc.domain.errors import Reason, Refused
from ficc.domain.lifecycle import IllegalTransition
from ficc.domain.upload import (
    TRANSITIONS,
    AlreadyVerified,
    Append,
    Event,
    Finish,
    Interrupt,
    Lose,
    Match,
    Mismatch,
    Record,
    Restart,
    Retry,
    Shorten,
    State,
    Verify,
    Write,
    admit,
    advance,
)
from support.lifecycles import final, product, reachable, ways_into

EXPECTED, ACTUAL = "a" * 64, "b" * 64
GONE = Reason("content_lost", "The file is gone.")
CHANGED = Reason("source_changed", "The source serves another file now.")
SAMPLES: list[Event] = [
    Write(1),
    Verify(),
    Match(),
    Mismatch(ACTUAL),
    Interrupt(),
    Shorten(3),
    Restart(CHANGED),
    Retry(),
    Lose(GONE),
]


def record(state: State = State.PARTIAL, offset: int = 40, size: int = 100) -> Record:
    return Record(EXPECTED, size, offset, state)


def fitting(state: State, event: Event) -> Record:
    """A record in this state whose offset the event fits."""
    return record(state, 100) if isinstance(event, Verify) else record(state, 40)


# The table.


@pytest.mark.parametrize(("state", "event"), product(State, SAMPLES))
def test_exactly_the_table_is_legal(state: State, event: Event) -> None:
    if (state, type(event)) in TRANSITIONS:
        assert advance(fitting(state, event), event).state is TRANSITIONS[state, type(event)]
    else:
        with pytest.raises(IllegalTransition):
            advance(fitting(state, event), event)


def test_every_state_is_reached_and_only_a_loss_leads_away_from_what_is_proved() -> None:
    assert tuple(type(event) for event in SAMPLES) == upload.EVENTS
    assert reachable(TRANSITIONS, State.MISSING) == set(State)
    assert final(TRANSITIONS, State) == set()
    assert {event for state, event in TRANSITIONS if state is State.VERIFIED} == {Lose}
    assert advance(record(State.VERIFIED, 100), Lose(GONE)) == Record(EXPECTED, 100, 0, State.MISSING, GONE)


def test_only_a_right_hash_verifies() -> None:
    assert ways_into(TRANSITIONS, State.VERIFIED) == {(State.VERIFYING, Match)}


# What a step does to the record.


def test_a11_a_wrong_hash_names_both_digests_and_starts_again() -> None:
    failed = advance(record(State.VERIFYING, 100), Mismatch(ACTUAL))
    assert (failed.state, failed.offset) == (State.FAILED, 0)
    assert failed.error is not None
    assert failed.error.code == "source_mismatch"
    assert EXPECTED in failed.error.message
    assert ACTUAL in failed.error.message
    again = advance(failed, Write(10))
    assert (again.state, again.offset, again.error) == (State.PARTIAL, 10, None)


def test_a_shortened_partial_says_so() -> None:
    after = advance(record(), Shorten(7))
    assert (after.state, after.offset) == (State.PARTIAL, 7)
    assert after.error is not None
    assert after.error.code == "partial_shortened"
    more = advance(after, Write(93))
    assert more.error == after.error, "whoever looks later still learns why it fell"
    assert advance(advance(more, Verify()), Match()).error is None


@pytest.mark.parametrize("state", [State.PARTIAL, State.VERIFYING])
def test_a6_a_restart_says_why(state: State) -> None:
    after = advance(record(state, 100), Restart(CHANGED))
    assert (after.state, after.offset, after.error) == (State.PARTIAL, 0, CHANGED)


def test_an_interrupted_verification_keeps_every_byte() -> None:
    after = advance(record(State.VERIFYING, 100), Interrupt())
    assert after == record(State.PARTIAL, 100)
    assert admit(after, 100, 0) == Finish()


def test_a_file_of_no_bytes_is_verified_at_once() -> None:
    empty = Record(EXPECTED, 0)
    assert admit(empty, 0, 0) == Finish()
    assert advance(advance(empty, Verify()), Match()).state is State.VERIFIED


@pytest.mark.parametrize("event", [Write(61), Write(-1), Verify(), Shorten(40), Shorten(-1)])
def test_an_event_that_does_not_fit_the_offset_is_a_fault(event: Event) -> None:
    with pytest.raises(ValueError):
        advance(record(), event)


def test_the_smallest_steps_are_legal() -> None:
    """A file that was taken over whole may have nothing more to write, and a crash may leave nothing."""
    full = record(State.PARTIAL, 100)
    assert advance(full, Write(0)) == full
    assert advance(record(), Shorten(0)).offset == 0
    assert advance(record(), Shorten(39)).offset == 39


@given(
    st.integers(0, 30),
    st.lists(
        st.builds(Write, st.integers(-1, 12))
        | st.builds(Shorten, st.integers(-1, 12))
        | st.sampled_from([Verify(), Match(), Mismatch(ACTUAL), Interrupt(), Restart(CHANGED), Retry()]),
        max_size=25,
    ),
)
def test_the_offset_never_goes_back_without_an_error(size: int, events: list[Event]) -> None:
    here = Record(EXPECTED, size)
    for event in events:
        try:
            after = advance(here, event)
        except (IllegalTransition, ValueError):
            continue
        assert after.offset >= here.offset or after.error is not None
        assert 0 <= after.offset <= size
        if after.state in (State.VERIFYING, State.VERIFIED):
            assert after.offset == size
            assert after.error is None
        assert (after.sha256, after.bytes) == (EXPECTED, size)
        here = after


# What a piece does.


def test_a_piece_goes_exactly_at_the_durable_offset() -> None:
    assert admit(record(), 40, 1) == Append()
    assert admit(record(), 40, 60) == Append()
    for offset in (0, 39, 41, 100):
        with pytest.raises(Refused) as caught:
            admit(record(), offset, 1)
        assert caught.value.code == "offset_mismatch"
        assert caught.value.beside == {"offset": 40}


def test_a_piece_past_the_declared_size_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        admit(record(), 40, 61)
    assert (caught.value.code, caught.value.beside) == ("invalid_request", {"offset": 40})


def test_an_empty_piece_finishes_a_full_length_partial() -> None:
    assert admit(record(State.PARTIAL, 100), 100, 0) == Finish()
    assert admit(record(State.VERIFIED, 100), 100, 0) == AlreadyVerified()


@pytest.mark.parametrize(("durable", "offset"), [(0, 0), (40, 40), (40, 100), (40, 0), (100, 40), (100, 101)])
def test_any_other_empty_piece_is_refused_as_such(durable: int, offset: int) -> None:
    """Whatever its offset: an upload at the declared size of a shorter partial finishes nothing either."""
    with pytest.raises(Refused) as caught:
        admit(record(State.PARTIAL, durable), offset, 0)
    assert caught.value.code == "empty_upload"
    assert caught.value.beside == {"offset": durable}


@pytest.mark.parametrize("length", [0, 1])
def test_nothing_is_taken_while_the_file_is_verified(length: int) -> None:
    with pytest.raises(Refused) as caught:
        admit(record(State.VERIFYING, 100), 100, length)
    assert (caught.value.code, caught.value.retry_after_seconds) == ("model_busy", 1)
    assert caught.value.beside == {"offset": 100}


def test_more_for_a_verified_file_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        admit(record(State.VERIFIED, 100), 100, 1)
    assert caught.value.code == "invalid_request"


def admitted(here: Record, offset: int, length: int) -> Append | Finish | AlreadyVerified | int:
    """The decision, or the durable offset that a refusal tells."""
    try:
        return admit(here, offset, length)
    except Refused as refused:
        return int(refused.beside["offset"])


PIECES = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 12)), max_size=30)


@given(st.binary(max_size=20), PIECES)
def test_a16_pieces_from_anyone_in_any_order_build_the_file_or_are_refused(
    content: bytes, pieces: list[tuple[int, int]]
) -> None:
    """Several clients upload at once; whoever is not at the durable offset gets it told. What was taken is
    always a prefix of the content."""
    here, disk = Record(EXPECTED, len(content)), b""
    for offset, length in pieces:
        piece = content[offset : offset + length]
        decision = admitted(here, offset, len(piece))
        if isinstance(decision, int):
            assert decision == here.offset
        elif isinstance(decision, Append):
            disk = disk[:offset] + piece
            here = advance(here, Write(len(piece)))
        else:
            assert disk == content
        assert disk == content[: here.offset]


def test_the_named_limits_are_the_interfaces() -> None:
    assert upload.JSON_BYTES_MAX == 1024 * 1024
    assert upload.OCTET_STREAM_BYTES_MAX == 16 * 1024 * 1024
    assert upload.OCTET_STREAMS_MAX == 2
