"""An HTTP/1 request, as strict as the edge wants it, and where its body may end.

httptools splits the fields and refuses what no grammar allows: bare CR or LF, folded lines, NUL, a space
before a colon, lengths that are no number. What it lets pass, and what two programs in a row could read
differently, is refused here, so that everybody behind the edge sees one meaning:

- the request line is `METHOD target HTTP/1.0|1.1` with single spaces, and the target a path;
- exactly one Host (RFC 9112, 3.2), none or one in HTTP/1.0, and at most one Authorization;
- the body is framed by one Content-Length or by `Transfer-Encoding: chunked`, to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ficc.domain.errors import Refused
from ficc.protocol.http_api import usable_request_id

Headers = Sequence[tuple[bytes, bytes]]
Fields = dict[bytes, list[bytes]]

VERSIONS = {b"HTTP/1.1": "1.1", b"HTTP/1.0": "1.0"}
EMPTY_LINE = b"\r\n\r\n"
CHUNK_OVERHEAD_BYTES_FREE = 128  # size, line ends and a signature, as some storage clients send
REQUEST_LINE_BESIDES_URL_BYTES_MAX = 32  # the longest method, two spaces, the version, CR
_DECISIVE = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"transfer-encoding",
        b"x-request-id",
    }
)
LINES_KEPT = 1024
"""Request lines whose parts are remembered: clients ask for the same again and again."""
LINE_KEPT_BYTES_MAX = 256
_TLS_HANDSHAKE = 0x16
_UPGRADE = re.compile(rb"\r\n(?i:upgrade):[ \t]*([^\r\n]*)")
_HOST = re.compile(rb"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


class RequestLine(NamedTuple):
    method: str
    path: bytes
    query: bytes
    version: str


class Framing(NamedTuple):
    """How the body is delimited. `length` is None for a chunked one, 0 for none at all."""

    length: int | None
    expects_continue: bool


class BodyBounds:
    """Tells how far a body may be fed to the parser before one must look whether it is over.

    A counted body is over after its length, a chunked one always behind an empty line. So whoever stops
    at each of these never feeds past the body, without knowing the grammar of chunks. What is not payload
    in a chunked body (extensions, trailers, zeros of a size) passes the parser without a trace, hence it
    is counted here.
    """

    __slots__ = ("_left", "_overhead_bytes", "_overhead_bytes_max", "_seam", "chunks", "payload_bytes")

    def __init__(self, length: int | None, overhead_bytes_max: int) -> None:
        self._left = length
        self._seam = b""  # the last three bytes, in which an empty line may have begun
        self._overhead_bytes = 0
        self._overhead_bytes_max = overhead_bytes_max
        self.payload_bytes = 0  # both counted up by what the parser reports
        self.chunks = 0

    def next_stop(self, data: bytes, start: int) -> int:
        """Where to look next: behind `start`, at most where `data` ends."""
        if self._left is not None:
            return min(start + self._left, len(data))
        if start == 0:
            across = (self._seam + data[:3]).find(EMPTY_LINE)
            if across >= 0:
                return across + len(EMPTY_LINE) - len(self._seam)
        found = data.find(EMPTY_LINE, start)
        return len(data) if found < 0 else found + len(EMPTY_LINE)

    def passed(self, piece: bytes, payload_bytes: int) -> None:
        """`piece` was fed, and the parser found that much payload in it."""
        if self._left is not None:
            self._left -= len(piece)
            return
        self._seam = (self._seam + piece[-3:])[-3:]
        self._overhead_bytes += len(piece) - payload_bytes
        if self._overhead_bytes > self._overhead_bytes_max + CHUNK_OVERHEAD_BYTES_FREE * self.chunks:
            raise bad_http("The chunked body carries too much that is not payload.")


def bad_http(message: str) -> Refused:
    return Refused("bad_http", message)


def check_first_byte(byte: int) -> None:
    """Every method starts with a capital letter, so nothing else needs to be waited for."""
    if byte == _TLS_HANDSHAKE:
        raise bad_http("This port speaks HTTP, not HTTPS: use http:// in the URL.")
    if not 0x41 <= byte <= 0x5A:
        raise bad_http("The request does not start with an HTTP method.")


def request_line(line: bytes, url_bytes_max: int) -> RequestLine:
    """The parts of a request line, given with its line end."""
    keep = len(line) <= LINE_KEPT_BYTES_MAX and b"?" not in line  # a query may hold what is to be forgotten
    return (_known_parts if keep else _parts)(line, url_bytes_max)


def _parts(line: bytes, url_bytes_max: int) -> RequestLine:
    check_first_byte(line[0])
    if not line.endswith(b"\r\n"):
        raise bad_http("Lines of a request must end with CR LF.")
    parts = line[:-2].split(b" ")
    if len(parts) != 3:
        raise bad_http("The request line must be a method, a target and a version with single spaces.")
    method, target, version = parts
    if version not in VERSIONS:
        raise bad_http("This server speaks HTTP/1.1 and HTTP/1.0.")
    if len(target) > url_bytes_max:
        raise url_too_long(url_bytes_max)
    whole_server = method == b"OPTIONS" and target == b"*"
    if method == b"CONNECT" or b"#" in target or not (target.startswith(b"/") or whole_server):
        raise bad_http("The target must be a path with an optional query; this server is no proxy.")
    path, _, query = target.partition(b"?")
    try:
        return RequestLine(method.decode("ascii"), path, query, VERSIONS[version])
    except UnicodeDecodeError:
        raise bad_http("The method is not ASCII.") from None


_known_parts = lru_cache(LINES_KEPT)(_parts)


def url_too_long(url_bytes_max: int) -> Refused:
    return Refused("headers_too_large", f"The URL has more than {url_bytes_max} bytes; shorten it.")


def without_upgrade(head: bytes) -> tuple[bytes, bytes | None]:
    """The head without Upgrade fields, and the value of the last one.

    An offer to upgrade may be ignored (RFC 9110, 7.8), but httptools takes it at its word and would read
    the body as the next request. Java's HTTP client makes the offer with every first request.
    """
    offers: list[bytes] = _UPGRADE.findall(head)
    if not offers:
        return head, None
    return _UPGRADE.sub(b"", head), offers[-1].strip().lower()


def decisive_fields(headers: Headers) -> Fields:
    """The values of those fields that the edge itself goes by. Names are in lower case."""
    fields: Fields = {}
    for name, value in headers:
        if name in _DECISIVE:
            fields.setdefault(name, []).append(value)
    return fields


def framing(version: str, fields: Fields) -> Framing:
    """Checks the fields that say who is meant, who asks and where the body ends."""
    _check_host(version, fields.get(b"host", []))
    if len(fields.get(b"authorization", [])) > 1:
        raise bad_http("Send one Authorization header, not several.")
    lengths = fields.get(b"content-length", [])
    codings = fields.get(b"transfer-encoding", [])
    expects_continue = _expects_continue(version, fields.get(b"expect", []))
    if codings:
        if version == "1.0" or lengths or [coding.lower() for coding in codings] != [b"chunked"]:
            raise bad_http(
                "Transfer-Encoding must be exactly `chunked`, in HTTP/1.1 and without Content-Length."
            )
        return Framing(None, expects_continue)
    if not lengths:
        return Framing(0, False)
    if len(lengths) > 1 or not lengths[0].isdigit():
        raise bad_http("Content-Length must be given once, as decimal digits.")
    length = int(lengths[0])
    return Framing(length, expects_continue and length > 0)


def offers_websocket(fields: Fields, upgrade: bytes | None) -> bool:
    """Whether the request asks to become a WebSocket (RFC 6455, 4.1)."""
    tokens = b",".join(fields.get(b"connection", [])).lower().split(b",")
    return upgrade == b"websocket" and b"upgrade" in [token.strip() for token in tokens]


def own_request_id(fields: Fields) -> str | None:
    """The client's request id, where it sent one that can be kept."""
    values = [value.strip(b" \t") for value in fields.get(b"x-request-id", [])]
    return values[0].decode("ascii") if len(values) == 1 and usable_request_id(values[0]) else None


def _check_host(version: str, hosts: list[bytes]) -> None:
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise bad_http("The request must have exactly one Host header.")
    if hosts and not _HOST.fullmatch(hosts[0].strip(b" \t")):
        raise bad_http("The Host header must be a host name or address with an optional port.")


def _expects_continue(version: str, expectations: list[bytes]) -> bool:
    if version == "1.0" or not expectations:
        return False  # RFC 9110, 10.1.1: an HTTP/1.0 client's expectation is ignored
    if [value.strip(b" \t").lower() for value in expectations] != [b"100-continue"]:
        raise bad_http("The only expectation that can be met is `100-continue`.")
    return True
