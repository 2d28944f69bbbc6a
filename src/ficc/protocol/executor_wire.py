"""The executor's local protocol: frames over a unix socket, version 1.

    frame   = length u32 | kind u8 | flags u8 | reserved u16 | stream u64 | payload     (big endian)

`length` counts the payload. Payload bytes of an inference never pass through JSON or base64; control
frames carry one JSON object. A connection begins with HELLO and its answer, and then carries either

- control: CALL answered by RESULT or FAILURE with the same stream id, and EVENT pushed by the executor, or
- endpoints: OPEN or UPLOAD answered by REFUSED or OPENED (by the first DATA, where BY_DATA is set); READ answered by
  DATA; CANCEL. Each of the four carries the fence of the attempt, and the stream id is the caller's.

An UPLOAD hands admitted inputs to an engine that takes its model over its own API. It names inputs by the ids of the
plan and the model's name, and nothing else: paths, headers and bytes are the executor's. Its DATA are JSON lines.

Reads are pulled: the executor sends one DATA frame for each READ, with at most READ_BYTES_MAX bytes, so a
reader that stops asking stops the engine.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ficc.domain.errors import Refused
from ficc.domain.plan import PATH_BYTES_MAX, Fence

VERSION = 1
HEADER = struct.Struct(">IBBHQ")
READ_BYTES_MAX = 64 << 10
QUEUE_CHUNKS = 4
CONTROL_BYTES_MAX = 16 << 20
"""Above the largest plan and the longest reading of a log, written as JSON in ASCII."""
BODY_BYTES_MAX = 64 << 20
"""The wire's own bound on an inference body; an endpoint contract sets a lower one."""
CONTENT_TYPE_BYTES_MAX = 256
OPEN_BYTES_MAX = Fence.BYTES + 4 + 2 + PATH_BYTES_MAX + BODY_BYTES_MAX
UPLOAD_BYTES_MAX = Fence.BYTES + 4 + (256 << 10)


class Kind(IntEnum):
    HELLO = 1
    CALL = 2
    RESULT = 3
    FAILURE = 4
    EVENT = 5
    OPEN = 16
    OPENED = 17
    REFUSED = 18
    READ = 19
    DATA = 20
    CANCEL = 21
    UPLOAD = 22


# The flag of an OPEN frame.
BY_DATA = 1  # no OPENED, the first DATA says that the stream is open: one frame less to wake the caller

# Flags of a DATA frame.
HEAD = 1  # the payload begins with status u16, length u16 and the content type
END = 2  # the engine's answer is complete
BROKEN = 4  # the answer will not be completed; the payload is a JSON reason


PAYLOAD_BYTES_MAX: Mapping[Kind, int] = {
    Kind.HELLO: 4096,
    Kind.CALL: CONTROL_BYTES_MAX,
    Kind.RESULT: CONTROL_BYTES_MAX,
    Kind.FAILURE: CONTROL_BYTES_MAX,
    Kind.EVENT: CONTROL_BYTES_MAX,
    Kind.OPEN: OPEN_BYTES_MAX,
    Kind.OPENED: 0,
    Kind.REFUSED: 4096,
    Kind.READ: Fence.BYTES,
    Kind.DATA: 4 + CONTENT_TYPE_BYTES_MAX + READ_BYTES_MAX,
    Kind.CANCEL: Fence.BYTES,
    Kind.UPLOAD: UPLOAD_BYTES_MAX,
}


class WireError(Exception):
    """The peer broke the protocol; the connection is closed."""


class Frame(NamedTuple):
    """`kind` is one of Kind, as the plain integer it came as: this is the hot path."""

    kind: int
    stream: int
    payload: bytes
    flags: int = 0

    @property
    def json(self) -> dict[str, Any]:
        """The payload as a JSON object. Raises WireError."""
        try:
            document = json.loads(self.payload)
        except (ValueError, RecursionError) as error:
            raise WireError(f"{Kind(self.kind).name}: the payload is not JSON") from error
        if not isinstance(document, dict):
            raise WireError(f"{Kind(self.kind).name}: the payload is no JSON object")
        return document


def encode(kind: int, stream: int, payload: bytes | bytearray = b"", flags: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, flags, 0, stream) + payload


def encode_json(kind: Kind, stream: int, document: Mapping[str, Any]) -> bytes:
    return encode(kind, stream, json.dumps(document, separators=(",", ":")).encode())


class Decoder:
    """Frames out of bytes that arrive in any pieces. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that is complete now. Raises WireError for what is no frame of this version."""
        buffer = self._buffer
        buffer += data
        at, end = 0, len(buffer)
        try:
            while end - at >= HEADER.size:
                length, kind, flags, reserved, stream = HEADER.unpack_from(buffer, at)
                limit = _LIMITS.get(kind)
                if limit is None or reserved or length > limit or (flags and flags & ~_FLAGS.get(kind, 0)):
                    raise WireError(
                        f"no frame: kind {kind}, length {length}, flags {flags}, reserved {reserved}"
                    )
                after = at + HEADER.size + length
                if after > end:
                    break
                payload, at = bytes(buffer[at + HEADER.size : after]), after
                yield Frame(kind, stream, payload, flags)
        finally:
            del buffer[:at]


_LIMITS: dict[int, int] = {int(kind): limit for kind, limit in PAYLOAD_BYTES_MAX.items()}
_FLAGS: dict[int, int] = {int(Kind.OPEN): BY_DATA, int(Kind.DATA): HEAD | END | BROKEN}
"""The flags that a kind may carry; the other kinds carry none."""


# Endpoint frames.

FENCES_KEPT = 4096
"""One for each attempt, used for every invocation of it."""

packed = lru_cache(FENCES_KEPT)(Fence.pack)
"""The bytes of a fence. Raises ValueError."""
unpacked = lru_cache(FENCES_KEPT)(Fence.unpack)
"""The fence that these bytes are. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class Open:
    fence: Fence
    deadline_ms: int
    path: str
    body: bytes


_OPEN = struct.Struct(">IH")


def encode_open(stream: int, request: Open, *, by_data: bool = False) -> bytes:
    """OPEN: fence, time left until the deadline in ms, path length, path, body. The method is POST."""
    path = request.path.encode("ascii")
    return encode(
        Kind.OPEN,
        stream,
        b"".join((packed(request.fence), _OPEN.pack(request.deadline_ms, len(path)), path, request.body)),
        BY_DATA if by_data else 0,
    )


def decode_open(payload: bytes) -> Open:
    """Raises WireError."""
    at = Fence.BYTES + _OPEN.size
    if len(payload) < at:
        raise WireError("OPEN is too short")
    deadline_ms, length = _OPEN.unpack_from(payload, Fence.BYTES)
    if length > PATH_BYTES_MAX or len(payload) < at + length:
        raise WireError("OPEN: the path is cut or too long")
    try:
        path = payload[at : at + length].decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError("OPEN: the path is not ASCII") from error
    return Open(unpacked(payload[: Fence.BYTES]), deadline_ms, path, payload[at + length :])


@dataclass(frozen=True, slots=True)
class Upload:
    """`model` is the name that the engine is to serve the inputs under."""

    fence: Fence
    deadline_ms: int
    model: str
    input_ids: tuple[str, ...]


_DEADLINE = struct.Struct(">I")


def encode_upload(stream: int, request: Upload) -> bytes:
    """UPLOAD: fence, time left until the deadline in ms, {"model": name, "inputs": [ids]}."""
    document = json.dumps({"model": request.model, "inputs": request.input_ids}, separators=(",", ":"))
    deadline = _DEADLINE.pack(request.deadline_ms)
    return encode(Kind.UPLOAD, stream, b"".join((packed(request.fence), deadline, document.encode())))


def decode_upload(payload: bytes) -> Upload:
    """Raises WireError."""
    at = Fence.BYTES + _DEADLINE.size
    if len(payload) < at:
        raise WireError("UPLOAD is too short")
    document = Frame(Kind.UPLOAD, 0, payload[at:]).json
    model, inputs = document.get("model"), document.get("inputs")
    if (
        set(document) != {"model", "inputs"}
        or not isinstance(model, str)
        or not isinstance(inputs, list)
        or not all(isinstance(one, str) for one in inputs)
    ):
        raise WireError("UPLOAD: a model's name and the ids of inputs, and nothing else")
    (deadline_ms,) = _DEADLINE.unpack_from(payload, Fence.BYTES)
    return Upload(unpacked(payload[: Fence.BYTES]), deadline_ms, model, tuple(inputs))


@dataclass(frozen=True, slots=True)
class Head:
    """How an engine's answer begins: what is let through of its headers."""

    status: int
    content_type: str


@dataclass(frozen=True, slots=True)
class Data:
    head: Head | None
    data: bytes | bytearray
    end: bool


_HEAD = struct.Struct(">HH")


def encode_data(
    stream: int, chunk: bytes | bytearray, *, head: Head | None = None, end: bool = False
) -> bytes:
    flags = END if end else 0
    if head is None:
        return encode(Kind.DATA, stream, chunk, flags)
    content_type = head.content_type.encode("latin-1")[:CONTENT_TYPE_BYTES_MAX]
    prefix = _HEAD.pack(head.status, len(content_type)) + content_type
    return encode(Kind.DATA, stream, prefix + chunk, flags | HEAD)


def encode_broken(stream: int, refused: Refused) -> bytes:
    """DATA that ends a stream which the engine did not complete."""
    payload = json.dumps({"code": refused.code, "message": refused.message}).encode()
    return encode(Kind.DATA, stream, payload, BROKEN)


def decode_data(frame: Frame) -> Data:
    """Raises Refused for a broken stream, WireError for what is none."""
    if frame.flags & BROKEN:
        raise refusal(frame)
    payload = frame.payload
    if not frame.flags & HEAD:
        return Data(None, payload, bool(frame.flags & END))
    if len(payload) < _HEAD.size:
        raise WireError("DATA: the head is cut")
    status, length = _HEAD.unpack_from(payload)
    if len(payload) < _HEAD.size + length:
        raise WireError("DATA: the content type is cut")
    content_type = payload[_HEAD.size : _HEAD.size + length].decode("latin-1")
    return Data(Head(status, content_type), payload[_HEAD.size + length :], bool(frame.flags & END))


def encode_refusal(kind: Kind, stream: int, refused: Refused) -> bytes:
    """FAILURE or REFUSED."""
    document = {
        "code": refused.code,
        "message": refused.message,
        "param": refused.param,
        "retry_after_seconds": refused.retry_after_seconds,
        "details": dict(refused.details),
    }
    return encode_json(kind, stream, document)


def refusal(frame: Frame) -> Refused:
    """The refusal that a FAILURE, a REFUSED or a broken DATA carries. Raises WireError."""
    document = frame.json
    code, message = document.get("code"), document.get("message")
    param, details = document.get("param"), document.get("details") or {}
    retry_after = document.get("retry_after_seconds")
    if (
        not isinstance(code, str)
        or not isinstance(message, str)
        or not isinstance(param, str | None)
        or not isinstance(retry_after, int | None)
        or not isinstance(details, dict)
    ):
        raise WireError(f"{Kind(frame.kind).name}: not the shape of a refusal")
    return Refused(code, message, param, retry_after, details)
