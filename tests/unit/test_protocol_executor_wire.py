"""The executor's frames: both directions of each, any cut of any sequence, and what is no frame."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import ids
from ficc.domain.errors import Refused
from ficc.domain.plan import ARGUMENT_BYTES_MAX, PLAN_BYTES_MAX, Fence
from ficc.protocol import executor_wire as wire
from ficc.protocol.executor_wire import (
    BROKEN,
    BY_DATA,
    END,
    HEAD,
    HEADER,
    PAYLOAD_BYTES_MAX,
    READ_BYTES_MAX,
    Data,
    Decoder,
    Frame,
    Head,
    Kind,
    Open,
    Upload,
    WireError,
)

FENCE = Fence("01arz3ndektsv4rrffq69g5fav", 3, "ab" * 32)
FENCES = st.builds(
    Fence,
    st.binary(min_size=16, max_size=16).map(ids.from_bytes),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
)


def decode(*pieces: bytes, decoder: Decoder | None = None) -> list[Frame]:
    decoder = decoder or Decoder()
    return [frame for piece in pieces for frame in decoder.feed(piece)]


def one(data: bytes) -> Frame:
    (frame,) = decode(data)
    return frame


# Framing.


def test_a_frame_is_these_bytes() -> None:
    assert wire.encode(Kind.READ, 7, b"abc") == (
        b"\x00\x00\x00\x03\x13\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x07abc"
    )
    assert HEADER.size == 16


def test_the_numbers_of_version_1() -> None:
    """Two releases that speak version 1 agree on these."""
    assert wire.VERSION == 1
    control, endpoint = [1, 2, 3, 4, 5], [16, 17, 18, 19, 20, 21, 22]
    assert [(int(kind), kind.name) for kind in Kind] == [
        *zip(control, ["HELLO", "CALL", "RESULT", "FAILURE", "EVENT"], strict=True),
        *zip(endpoint, ["OPEN", "OPENED", "REFUSED", "READ", "DATA", "CANCEL", "UPLOAD"], strict=True),
    ]
    assert (HEAD, END, BROKEN) == (1, 2, 4)
    assert (READ_BYTES_MAX, wire.QUEUE_CHUNKS) == (65536, 4)
    fence = 56
    assert [PAYLOAD_BYTES_MAX[kind] for kind in Kind] == [
        *(4096, 1 << 24, 1 << 24, 1 << 24, 1 << 24),
        *(fence + 6 + 512 + (64 << 20), 0, 4096, fence, 4 + 256 + 65536, fence),
        fence + 4 + (256 << 10),
    ]


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    payload = draw(st.binary(max_size=min(80, PAYLOAD_BYTES_MAX[kind])))
    flags = draw(st.integers(0, {Kind.DATA: HEAD | END | BROKEN, Kind.OPEN: BY_DATA}.get(kind, 0)))
    return Frame(int(kind), draw(st.integers(0, 2**64 - 1)), payload, flags)


@given(st.lists(frames(), max_size=8), st.lists(st.integers(0, 900), max_size=12))
def test_any_cut_of_any_sequence_gives_the_same_frames(sequence: list[Frame], at: list[int]) -> None:
    data = b"".join(wire.encode(f.kind, f.stream, f.payload, f.flags) for f in sequence)
    marks = sorted({min(mark, len(data)) for mark in at})
    pieces = [data[a:b] for a, b in zip([0, *marks], [*marks, len(data)], strict=True)]
    assert decode(*pieces) == sequence


@given(st.lists(frames(), min_size=1, max_size=4))
def test_one_byte_at_a_time_gives_each_frame_at_its_last_byte(sequence: list[Frame]) -> None:
    decoder = Decoder()
    for frame in sequence:
        data = wire.encode(frame.kind, frame.stream, frame.payload, frame.flags)
        for index in range(len(data) - 1):
            assert decode(data[index : index + 1], decoder=decoder) == []
        assert decode(data[-1:], decoder=decoder) == [frame]


@given(st.lists(frames(), max_size=6), st.integers(0, 400))
def test_at_most_one_incomplete_frame_is_held(sequence: list[Frame], mark: int) -> None:
    encoded = [wire.encode(f.kind, f.stream, f.payload, f.flags) for f in sequence]
    data = b"".join(encoded)[:mark]
    decoder = Decoder()
    complete = decode(data, decoder=decoder)
    left = len(data) - sum(len(encoded[index]) for index in range(len(complete)))
    assert len(decoder._buffer) == left
    assert left == 0 or left < len(encoded[len(complete)])


def test_a_reader_that_stops_in_the_middle_loses_nothing() -> None:
    decoder = Decoder()
    feed = decoder.feed(wire.encode(Kind.READ, 1, b"a") + wire.encode(Kind.READ, 2, b"b"))
    assert next(feed).stream == 1
    feed.close()
    assert [frame.stream for frame in decoder.feed(b"")] == [2]


# What is no frame.


def header(length: int = 0, kind: int = Kind.READ, flags: int = 0, reserved: int = 0) -> bytes:
    return struct.pack(">IBBHQ", length, kind, flags, reserved, 1)


@pytest.mark.parametrize("kind", sorted(set(range(256)) - set(map(int, Kind))))
def test_an_unknown_kind_is_no_frame(kind: int) -> None:
    with pytest.raises(WireError, match=f"kind {kind}"):
        decode(header(kind=kind))


@pytest.mark.parametrize("kind", Kind)
def test_a_payload_at_its_limit_is_awaited_and_one_past_it_refused_from_the_header_alone(kind: Kind) -> None:
    limit = PAYLOAD_BYTES_MAX[kind]
    waiting = decode(header(limit, kind))
    assert waiting == ([] if limit else [Frame(int(kind), 1, b"")])
    with pytest.raises(WireError, match=f"length {limit + 1}"):
        decode(header(limit + 1, kind))


@pytest.mark.parametrize("bit", range(16))
def test_reserved_bits_are_zero(bit: int) -> None:
    with pytest.raises(WireError, match="reserved"):
        decode(header(reserved=1 << bit))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("bit", range(8))
def test_flags_that_a_kind_does_not_have_are_zero(kind: Kind, bit: int) -> None:
    data = header(kind=kind, flags=1 << bit)
    if (kind is Kind.DATA and bit < 3) or (kind is Kind.OPEN and bit < 1):
        assert decode(data)[0].flags == 1 << bit
    else:
        with pytest.raises(WireError, match="flags"):
            decode(data)


def test_frames_before_a_bad_one_are_handed_out() -> None:
    feed = Decoder().feed(wire.encode(Kind.READ, 1) + header(kind=99))
    assert next(feed).stream == 1
    with pytest.raises(WireError):
        next(feed)


@given(st.binary(max_size=80))
def test_only_frames_or_a_wire_error_come_out_of_any_bytes(data: bytes) -> None:
    try:
        for frame in decode(data):
            assert len(frame.payload) <= PAYLOAD_BYTES_MAX[Kind(frame.kind)]
    except WireError:
        pass


# Control frames.

JSON = st.dictionaries(
    st.text(max_size=6), st.none() | st.booleans() | st.integers() | st.text(max_size=9), max_size=4
)


@given(st.sampled_from([Kind.HELLO, Kind.CALL, Kind.RESULT, Kind.EVENT]), st.integers(0, 2**64 - 1), JSON)
def test_a_control_frame_carries_one_json_object(kind: Kind, stream: int, document: dict[str, Any]) -> None:
    frame = one(wire.encode_json(kind, stream, document))
    assert (frame.kind, frame.stream, frame.flags) == (kind, stream, 0)
    assert frame.json == document


@pytest.mark.parametrize(
    "payload",
    [b"", b"[]", b"5", b"null", b'"x"', b"{", b"\xff", b'{"a":' * 90_000],
    ids=lambda p: repr(p[:8]),
)
def test_another_payload_is_no_control_frame(payload: bytes) -> None:
    with pytest.raises(WireError, match="CALL"):
        _ = Frame(int(Kind.CALL), 1, payload).json


def test_the_largest_plan_and_the_longest_log_fit_a_control_frame() -> None:
    """JSON in ASCII writes a two-byte character in six bytes, and an undecodable byte as well."""
    fence_and_lease = 1024
    assert PLAN_BYTES_MAX * 3 + ARGUMENT_BYTES_MAX + fence_and_lease <= PAYLOAD_BYTES_MAX[Kind.CALL]
    log = (b"\xff" * (256 << 10)).decode("utf-8", "replace")
    frame = wire.encode_json(Kind.RESULT, 1, {"text": log, "truncated": True})
    assert one(frame).json["text"] == log


# OPEN, READ, CANCEL.

PATHS = st.text("abcdefghijklmnopqrstuvwxyz/_-", min_size=1, max_size=60).map(lambda text: "/" + text)


@given(st.integers(0, 2**64 - 1), FENCES, st.integers(0, 2**32 - 1), PATHS, st.binary(max_size=200))
def test_open_survives_the_wire(stream: int, fence: Fence, deadline: int, path: str, body: bytes) -> None:
    request = Open(fence, deadline, path, body)
    frame = one(wire.encode_open(stream, request))
    assert (frame.kind, frame.stream) == (Kind.OPEN, stream)
    assert wire.decode_open(frame.payload) == request


@pytest.mark.parametrize("by_data", [False, True])
def test_open_is_these_bytes(by_data: bool) -> None:
    frame = one(wire.encode_open(1, Open(FENCE, 258, "/v1", b"{}"), by_data=by_data))
    assert frame.payload == FENCE.pack() + b"\x00\x00\x01\x02" + b"\x00\x03" + b"/v1" + b"{}"
    assert frame.flags == by_data


@given(st.binary(max_size=120))
def test_any_payload_is_an_open_or_a_wire_error(payload: bytes) -> None:
    try:
        request = wire.decode_open(payload)
    except WireError:
        return
    assert one(wire.encode_open(1, request)).payload == payload


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        (b"\x00\x00\x00\x01\x00", "too short"),
        (b"\x00\x00\x00\x01\x00\x05/v1", "cut or too long"),
        (b"\x00\x00\x00\x01\x02\x01" + b"/" * 513, "cut or too long"),
        (b"\x00\x00\x00\x01\x00\x02\xc3\xa9", "not ASCII"),
    ],
)
def test_a_malformed_open_says_why(rest: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        wire.decode_open(FENCE.pack() + rest)


def test_the_longest_path_is_512_bytes() -> None:
    request = Open(FENCE, 1, "/" * 512, b"")
    assert wire.decode_open(one(wire.encode_open(1, request)).payload) == request


@given(st.integers(0, 2**64 - 1), FENCES, st.integers(0, 2**32 - 1), st.text(), st.lists(st.text()))
def test_upload_survives_the_wire(
    stream: int, fence: Fence, deadline: int, model: str, ids: list[str]
) -> None:
    request = Upload(fence, deadline, model, tuple(ids))
    frame = one(wire.encode_upload(stream, request))
    assert (frame.kind, frame.stream) == (Kind.UPLOAD, stream)
    assert wire.decode_upload(frame.payload) == request


def test_upload_is_these_bytes() -> None:
    payload = one(wire.encode_upload(1, Upload(FENCE, 258, "a", ("model-0",)))).payload
    assert payload == FENCE.pack() + b"\x00\x00\x01\x02" + b'{"model":"a","inputs":["model-0"]}'


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\1",
        b"\0\0\0\1[]",
        b'\0\0\0\1{"model":"a"}',
        b'\0\0\0\1{"model":"a","inputs":"b"}',
        b'\0\0\0\1{"model":1,"inputs":[]}',
        b'\0\0\0\1{"model":"a","inputs":[1]}',
        b'\0\0\0\1{"model":"a","inputs":[],"path":"/x"}',
    ],
)
def test_a_malformed_upload_is_a_wire_error(rest: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_upload(FENCE.pack() + rest)


@given(FENCES)
def test_read_and_cancel_carry_a_fence(fence: Fence) -> None:
    for kind in (Kind.READ, Kind.CANCEL):
        frame = one(wire.encode(kind, 5, fence.pack()))
        assert Fence.unpack(frame.payload) == fence


# DATA.


@given(
    st.binary(max_size=100),
    st.none() | st.builds(Head, st.integers(100, 999), st.text("abc/;=- ", max_size=40)),
    st.booleans(),
)
def test_data_survives_the_wire(chunk: bytes, head: Head | None, end: bool) -> None:
    for made in (chunk, bytearray(chunk)):
        frame = one(wire.encode_data(9, made, head=head, end=end))
        assert frame.flags == (HEAD if head else 0) | (END if end else 0)
        assert wire.decode_data(frame) == Data(head, chunk, end)


def test_the_largest_data_fits_and_a_long_content_type_is_cut() -> None:
    head = Head(200, "x" * 300)
    frame = one(wire.encode_data(1, bytes(READ_BYTES_MAX), head=head, end=True))
    data = wire.decode_data(frame)
    assert data.head == Head(200, "x" * 256)
    assert len(data.data) == READ_BYTES_MAX
    with pytest.raises(WireError):
        decode(wire.encode_data(1, bytes(READ_BYTES_MAX + 1), head=head))


@pytest.mark.parametrize("payload", [b"", b"\x00\xc8\x00", b"\x00\xc8\x00\x05text"])
def test_a_head_that_is_cut_is_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError, match="is cut"):
        wire.decode_data(Frame(int(Kind.DATA), 1, payload, HEAD))


@given(st.binary(max_size=60), st.integers(0, 7))
def test_any_data_is_data_a_refusal_or_a_wire_error(payload: bytes, flags: int) -> None:
    try:
        data = wire.decode_data(Frame(int(Kind.DATA), 1, payload, flags))
    except (WireError, Refused):
        return
    assert payload.endswith(bytes(data.data))
    assert data.end == bool(flags & END)


def test_a_broken_stream_ends_in_its_reason() -> None:
    frame = one(wire.encode_broken(4, Refused("peer_lost", "The request was cancelled.")))
    assert (frame.kind, frame.stream, frame.flags) == (Kind.DATA, 4, BROKEN)
    with pytest.raises(Refused) as caught:
        wire.decode_data(frame)
    assert (caught.value.code, caught.value.message) == ("peer_lost", "The request was cancelled.")


# Refusals.


@given(
    st.sampled_from([Kind.FAILURE, Kind.REFUSED]),
    st.text(min_size=1, max_size=12),
    st.text(max_size=30),
    st.none() | st.text(max_size=9),
    st.none() | st.integers(0, 3600),
    JSON,
)
def test_a_refusal_survives_the_wire(
    kind: Kind, code: str, message: str, param: str | None, retry_after: int | None, details: dict[str, Any]
) -> None:
    frame = one(wire.encode_refusal(kind, 3, Refused(code, message, param, retry_after, details)))
    assert frame.kind == kind
    got = wire.refusal(frame)
    assert (got.code, got.message, got.param, got.retry_after_seconds, got.details) == (
        code,
        message,
        param,
        retry_after,
        details,
    )


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"code": "busy"},
        {"message": "m"},
        {"code": 5, "message": "m"},
        {"code": "busy", "message": None},
        {"code": "busy", "message": "m", "param": 5},
        {"code": "busy", "message": "m", "retry_after_seconds": "soon"},
        {"code": "busy", "message": "m", "details": ["x"]},
    ],
)
def test_another_shape_is_no_refusal(document: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        wire.refusal(Frame(int(Kind.REFUSED), 1, json.dumps(document).encode()))
