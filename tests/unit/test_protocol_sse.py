"""The scanner of streams: where another event may begin, and whether the stream said that it is done, however
its bytes are cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.protocol import sse
from ficc.protocol.sse import Scanner

ENDS = ["\n", "\r\n", "\r"]


def scanned(*pieces: bytes) -> Scanner:
    scanner = Scanner()
    for piece in pieces:
        scanner.feed(piece)
    return scanner


def cut(data: bytes, at: list[int]) -> list[bytes]:
    marks = sorted({min(mark, len(data)) for mark in at})
    return [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)]


# Between events.


@pytest.mark.parametrize("end", ENDS, ids=["LF", "CRLF", "CR"])
def test_g5_a_blank_line_ends_an_event_whatever_ends_lines(end: str) -> None:
    event = f"data: a{end}{end}".encode()
    assert scanned(event).between_events
    assert scanned(event, event).between_events
    for length in range(1, len(event) - len(end)):
        assert not scanned(event[:length]).between_events
    assert not scanned(f"data: a{end}".encode()).between_events
    assert not scanned(event, f"data: b{end}".encode()).between_events


@pytest.mark.parametrize("text", ["a\n\r\n", "a\r\n\n", "a\r\r\n", "a\n\r", "a\r\n\r"])
def test_g5_ends_of_lines_may_be_mixed(text: str) -> None:
    assert scanned(text.encode()).between_events


@pytest.mark.parametrize("text", ["a\r\n", "a\n", "a\r", "a", ": ping\n", "data: \\n\\n"])
def test_one_end_of_a_line_ends_no_event(text: str) -> None:
    assert not scanned(text.encode()).between_events


@pytest.mark.parametrize("text", ["", "\n", "\r\n", "\r", "\n\n\n"])
def test_a_stream_begins_where_an_event_may_begin(text: str) -> None:
    assert scanned(text.encode()).between_events


LINES = st.lists(
    st.tuples(st.sampled_from(["", "data: x", ": c", "data: [DONE]", "id: 1"]), st.sampled_from(ENDS)),
    max_size=8,
)
STREAMS = st.builds(
    lambda lines, rest: ("".join(line + end for line, end in lines) + rest).encode(),
    LINES,
    st.sampled_from(["", "", "da", "data: y"]),
)


def stands_between(stream: str) -> bool:
    """By the standard's own way to read: whole lines, the last of them blank (or none yet)."""
    lines = re.split(r"\r\n|\n|\r", stream)
    return lines[-1] == "" and (len(lines) == 1 or lines[-2] == "" or set(lines) == {""})


@given(STREAMS, st.lists(st.integers(0, 60), max_size=6))
def test_g6_the_scanner_agrees_with_the_standard_however_a_stream_is_cut(
    stream: bytes, at: list[int]
) -> None:
    scanner = scanned(*cut(stream, at))
    assert scanner.between_events == stands_between(stream.decode())
    lines = re.split(r"\r\n|\n|\r", stream.decode())
    assert scanner.done == ("data: [DONE]" in lines)


def test_g6_one_byte_at_a_time() -> None:
    stream = 'data: {"c":"😀"}\r\n\r\ndata: [DONE]\r\n\r\n'.encode()
    scanner, seen = Scanner(), []
    for index in range(len(stream)):
        scanner.feed(stream[index : index + 1])
        seen.append(scanner.between_events)
    assert scanner.done
    assert [index for index, between in enumerate(seen) if between] == [
        stream.index(b"\r\n\r\n") + 2,  # the CR that may be a whole end of a line
        stream.index(b"\r\n\r\n") + 3,
        len(stream) - 2,
        len(stream) - 1,
    ]


# Done.


@pytest.mark.parametrize("end", ENDS, ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("space", ["", " "])
def test_a_line_of_its_own_says_done(end: str, space: str) -> None:
    done = f"data:{space}[DONE]{end}{end}".encode()
    event = f"data: {{}}{end}{end}".encode()
    assert scanned(done).done
    assert scanned(event + done).done
    for mark in range(len(done)):
        assert scanned(event + done[:mark], done[mark:]).done


def test_done_in_front_of_a_long_reading_is_seen() -> None:
    assert scanned(b"data: [DONE]\n\n" + b": " + b"x" * 70_000 + b"\n\n").done
    assert scanned(b"data: {}\n\ndata: [DO", b"NE]\n\n" + b": x\n\n" * 20_000).done


@pytest.mark.parametrize(
    "text",
    [
        'data: {"content":"[DONE]"}\n\n',
        'data: {"content":"data: [DONE]"}\n\n',
        'data: {"content":"\\ndata: [DONE]\\n"}\n\n',
        "data: [DONE] \n\n",
        "data: [DONE]!\n\n",
        "data:  [DONE]\n\n",
        ": data: [DONE]\n\n",
        "event: [DONE]\n\n",
        "xdata: [DONE]\n\n",
        "[DONE]\n\n",
        "data: [done]\n\n",
    ],
)
def test_g1_a_text_that_says_done_does_not_end_the_stream(text: str) -> None:
    """Else an engine that dies after such a token would pass for one that came to its end."""
    assert not scanned(text.encode()).done


@given(st.text(max_size=40), st.lists(st.integers(0, 80), max_size=4))
def test_no_content_ever_says_done(content: str, at: list[int]) -> None:
    event = sse.event({"choices": [{"delta": {"content": f"\ndata: [DONE]\r\n{content}"}}]})
    scanner = scanned(*cut(event, at))
    assert not scanner.done
    assert scanner.between_events


def test_a_line_that_goes_on_behind_done_says_nothing() -> None:
    assert not scanned(b"data: [DONE]").done
    assert not scanned(b"data: [DONE]", b"junk\n\n").done


def test_done_on_the_last_line_counts_without_its_end() -> None:
    scanner = scanned(b"data: 1\n\n", b"data: [DO", b"NE]")
    scanner.finish()
    assert scanner.done


def test_done_stays_done() -> None:
    assert scanned(b"data: [DONE]\n\n", b"data: {}\n\n", b"x" * 100).done


def test_empty_readings_change_nothing() -> None:
    assert scanned(b"", b"data: a\n", b"", b"\n", b"").between_events
    assert not Scanner().done


def test_g7_an_event_of_3_mb_leaves_nothing_behind() -> None:
    scanner = scanned(b"data: " + b"x" * (3 << 20))
    assert not scanner.between_events
    assert len(scanner._last) <= 32
    scanner.feed(bytearray(b"\n\n"))
    assert scanner.between_events


# Faults that an engine reports.

HARMLESS = [
    b'data: {"error":null,"choices":[]}\n\n',
    b'data: {"content":"error: {\\"message\\": 1}"}\n\n',
    b"event: errors\ndata: {}\n\n",
    b"event: error_free\ndata: {}\n\n",
    b": error: nothing\n\n",
    b"data: error: nothing\n\n",
    b'data: {"errors":[1]}\n\n',
    b'data: {"object":"errors"}\n\n',
    b"errors: 1\n\n",
]


@pytest.mark.parametrize("event", HARMLESS)
def test_g3_what_only_looks_like_a_fault_passes_unchanged(event: bytes) -> None:
    stream = b"data: 1\n\n" + event + b"data: [DONE]\n\n"
    for size in (1, 3, 16, 1000):
        scanner = Scanner()
        passed = [scanner.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
        assert b"".join(passed) == stream
        assert scanner.fault is None
        assert scanner.done


@pytest.mark.parametrize("end", ENDS, ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (['error: {"message":"m"}'], b'{"message":"m"}'),
        (["event: error", 'data: {"message":"m"}'], b'{"message":"m"}'),
        (["id: 7", "event:error", "data: {", 'data: "message":"m"}'], b'{\n"message":"m"}'),
        (['data: {"error":{"message":"m"}}'], b'{"error":{"message":"m"}}'),
        (['data:{"object": "error","message":"m"}'], b'{"object": "error","message":"m"}'),
    ],
)
def test_g3_a_fault_is_kept_back_whole_however_it_is_cut(lines: list[str], fault: bytes, end: str) -> None:
    before = f"data: 1{end}{end}".encode()
    stream = before + "".join(line + end for line in (*lines, "")).encode() + b"data: [DONE]\n\n"
    for size in (1, 2, 5, 1000):
        scanner, passed = Scanner(), b""
        for at in range(0, len(stream), size):
            passed += scanner.feed(stream[at : at + size])
        assert scanner.fault == fault
        assert not scanner.done
        assert scanner.between_events
        assert passed + scanner.repair in (before, before + f"id: 7{end}".encode() + b"\n")


def test_g3_a_fault_of_any_size_is_held_within_bounds() -> None:
    scanner = Scanner()
    assert scanner.feed(b'data: {"error": "') == b""
    for _ in range(20):
        assert scanner.feed(b"x" * 5000) == b""
    assert scanner.fault == b""


def test_a_fault_that_the_end_cuts_off_is_still_one() -> None:
    scanner = scanned(b'event: error\ndata: {"message":"m"}')
    assert scanner.fault is None
    scanner.finish()
    assert scanner.fault == b'{"message":"m"}'


@given(STREAMS, st.lists(st.integers(0, 60), max_size=6))
def test_g6_whatever_is_no_fault_passes_byte_for_byte(stream: bytes, at: list[int]) -> None:
    scanner = Scanner()
    passed = b"".join(bytes(scanner.feed(piece)) for piece in cut(stream, at))
    held = len(stream) - len(passed)
    assert stream.startswith(passed)
    assert held <= 16
    assert held == 0 or b"\n" not in stream[len(passed) :]


# Events of our own, and content types.


@given(
    st.dictionaries(
        st.text(max_size=5), st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=3
    )
)
def test_an_event_is_one_line_of_json_and_a_blank_one(document: dict[str, str]) -> None:
    event = sse.event(document)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert not {b"\n", b"\r"} & {event[:-2][index : index + 1] for index in range(len(event) - 2)}
    assert json.loads(event[6:]) == document
    assert scanned(event).between_events


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("text/event-stream", True),
        ("text/event-stream; charset=utf-8", True),
        ("Text/Event-Stream ;x", True),
        ("application/json", False),
        ("text/event-streams", False),
        ("", False),
    ],
)
def test_what_is_a_stream(content_type: str, expected: bool) -> None:
    assert sse.is_stream(content_type) == expected


# What passed.


@pytest.mark.parametrize("size", [1, 2, 5, 7, 4096, 100_000])
def test_events_are_counted_and_the_end_is_kept_however_they_are_cut(size: int) -> None:
    stream = b": a comment\n\n" + b'data: {"content":"data: \\ndata: "}\n\n' * 300 + b"data: [DONE]\n\n"
    tally = sse.Tally()
    for at in range(0, len(stream), size):
        tally.saw(stream[at : at + size])
    assert tally.events == 301
    assert tally.tail == (b"\n" + stream)[-sse.TALLY_BYTES_MAX :]
