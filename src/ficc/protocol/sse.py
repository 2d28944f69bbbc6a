"""Server-sent events as a relay sees them: bytes that are passed on unchanged, where they break, and what an
engine says in them of its own failure.

Source: the HTML standard, "Server-sent events" (lines end with LF, CRLF or CR, and a blank line ends an
event). The scanner looks at whole readings with one search for what is rare, and parses only an event that looks like
the report of a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: it is no event, and says that the connection lives."""
FAULT_BYTES_MAX = 64 << 10
"""How much of an event that reports a fault is looked at."""

# What stands at the beginning of a line. A text that merely has these characters in it stands inside a JSON string,
# on a line that begins otherwise, since JSON writes the ends of lines as escapes.
_MARK = (
    rb"(?:data: ?(?:(\[DONE\])[\r\n]|\{\"(?:error\"|object\": ?\"error\"))"
    rb"|error:|event: ?error[\r\n])"
)
_MARKS = re.compile(rb"\n" + _MARK)
_MARKS_AFTER_CR = re.compile(rb"\r" + _MARK)
"""Apart, because a search that begins with one certain character is many times faster."""
_DONE_AT_END = re.compile(rb"[\r\n]data: ?\[DONE\]\Z")
_BEGINNINGS = tuple(
    form.encode()
    for space in ("", " ")
    for form in (
        "error:",
        f"event:{space}error",
        f'data:{space}{{"error"',
        f'data:{space}{{"object":"error"',
        f'data:{space}{{"object": "error"',
    )
)
_END_OF_LINE = re.compile(rb"\r\n|\n|\r")
_END_OF_EVENT = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_BLANK_LINE = (b"\n\n", b"\r\r", b"\n\r", b"\n\r\n", b"\r\r\n")
"""How a stream ends just after a blank line: two ends of lines, of which CRLF is one."""
TALLY_BYTES_MAX = 4096
"""How much of a stream's end is kept to look for what the engine counted: its last events are small."""
_LINE_OF_DATA = b"\ndata:"
_KEPT = 32
"""Bytes of what came before that can still matter: the longest mark, and the end of the line in front of it."""


class Scanner:
    """Follows a stream: what of it may go on, whether it stands between two events, and whether it said that it is
    done. Once there is a `fault`, nothing more of the stream counts."""

    def __init__(self) -> None:
        self._last = b"\n\n"  # a stream begins where an event may begin
        self._held = (
            b""  # the end of that which was not passed on: a line that may become the report of a fault
        )
        self._suspect: bytearray | None = None
        self.done = False
        self.fault: bytes | None = None
        """What the engine said of its failure: a JSON text, as a rule."""
        self.repair = b""
        """What ends the event that was passed on in part before the fault was seen."""

    def feed(self, data: bytes | bytearray) -> bytes | bytearray:
        """What may be passed on. An event that reports a fault is kept back, and so are, for the moment, the few
        bytes that could be its beginning."""
        if self._suspect is not None:
            return self._collect(data)
        seen = self._last + data
        worth_a_look = not self.done and (b"error" in seen or b"[DONE]" in seen)
        if worth_a_look and (mark := self._mark(seen)) is not None:
            if mark[1] is None:
                return self._suspected(seen, mark.start() + 1)
            self.done = True
        held = b"" if self.done or data.endswith(b"\n") else _beginning(seen)
        if held or self._held:
            data = seen[len(self._last) - len(self._held) : len(seen) - len(held)]
        self._last, self._held = seen[-_KEPT:], held
        return data

    def finish(self) -> None:
        """The stream ends here: an unfinished line is a line."""
        if self._suspect is not None and self.fault is None:
            self.fault = _fault_of(bytes(self._suspect))
        if _DONE_AT_END.search(self._last):
            self.done = True

    @property
    def between_events(self) -> bool:
        """Whether another event may follow what was passed on (behind `repair`)."""
        return self._suspect is not None or self._last.endswith(_BLANK_LINE)

    def _mark(self, seen: bytes) -> re.Match[bytes] | None:
        """The first mark that these bytes complete."""
        patterns = (_MARKS, _MARKS_AFTER_CR) if b"\r" in seen else (_MARKS,)
        fresh = [
            mark for pattern in patterns for mark in pattern.finditer(seen) if mark.end() > len(self._last)
        ]
        return min(fresh, key=re.Match.start, default=None)

    def _suspected(self, seen: bytes, line: int) -> bytes | bytearray:
        """Begin to collect the event that has this line; what stands in front of it goes on."""
        new = len(self._last) - len(self._held)
        begin = max((mark.end() for mark in _END_OF_EVENT.finditer(seen, 0, line)), default=0)
        if begin < new:  # some of the event is on its way already
            begin, self.repair = line, b"\n"
        self._suspect = bytearray()
        return seen[new:begin] + self._collect(seen[begin:])

    def _collect(self, data: bytes | bytearray) -> bytes | bytearray:
        """Add to the suspected event, and decide once it is whole."""
        assert self._suspect is not None
        suspect = self._suspect
        suspect += data
        end = _END_OF_EVENT.search(suspect)
        if self.fault is not None or (end is None and len(suspect) <= FAULT_BYTES_MAX):
            return b""
        if end is None:
            self.fault = b""
            return b""
        event, rest = bytes(suspect[: end.end()]), suspect[end.end() :]
        self.fault = _fault_of(event)
        if self.fault is not None:
            return b""
        self._suspect, self.repair = None, b""
        self._last, self._held = event[-_KEPT:], b""
        return event + self.feed(rest)


class Tally:
    """What passed: the number of events that began with data, and the end of it all."""

    __slots__ = ("events", "tail")

    def __init__(self) -> None:
        self.events = 0
        self.tail: bytes | bytearray = b"\n"

    def saw(self, data: bytes | bytearray) -> None:
        """Lines that end with a lone CR are not counted."""
        joint = self.tail[-5:] + data[:5]
        self.events += joint.count(_LINE_OF_DATA) + data.count(_LINE_OF_DATA)
        if len(data) < TALLY_BYTES_MAX:
            data = self.tail + data
        self.tail = data[-TALLY_BYTES_MAX:]


def _beginning(seen: bytes) -> bytes:
    """The unfinished line at the end, if it may become the report of a fault."""
    tail = seen[-_KEPT:]
    line_end = max(tail.rfind(b"\n"), tail.rfind(b"\r"))
    line = tail[line_end + 1 :]
    suspicious = line_end >= 0 and any(form.startswith(line) for form in _BEGINNINGS)
    return line if suspicious else b""


def _fault_of(event: bytes) -> bytes | None:
    """What an event says of a failure; None for one that only looks like it (an `error` that is null)."""
    fields: dict[bytes, list[bytes]] = {}
    for line in _END_OF_LINE.split(event):
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.removeprefix(b" "))
    if b"error" in fields:  # llama.cpp before its pull request 16109
        return b"\n".join(fields[b"error"])
    data = b"\n".join(fields.get(b"data", ()))
    if fields.get(b"event", [b""])[-1] == b"error":
        return data
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if isinstance(document, dict) and (document.get("error") or document.get("object") == "error"):
        return data
    return None


def event(document: Mapping[str, Any]) -> bytes:
    """One event carrying a JSON document."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def is_stream(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == CONTENT_TYPE
