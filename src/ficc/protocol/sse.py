"""Server-sent events as a relay sees them: bytes that are passed on unchanged, and where they break.

Source: the HTML standard, "Server-sent events" (lines end with LF, CRLF or CR, and a blank line ends an
event). The scanner looks at whole readings and parses nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "text/event-stream"
_DONE = b"[DONE]"
_DONE_LINE = re.compile(rb"[\r\n]data: ?\[DONE\](?![^\r\n])")
"""A whole line. A text that merely has these characters in it stands inside a JSON string, on a line that
begins otherwise, since JSON writes the ends of lines as escapes."""
_BLANK_LINE = (b"\n\n", b"\r\r", b"\n\r", b"\n\r\n", b"\r\r\n")
"""How a stream ends just after a blank line: two ends of lines, of which CRLF is one."""
_KEPT = 16
"""Bytes of what came before that can still matter to where an event ends or says that it is done."""


class Scanner:
    """Follows a stream: whether it stands between two events, and whether it said that it is done."""

    def __init__(self) -> None:
        self._last = b"\n\n"  # a stream begins where an event may begin
        self.done = False

    def feed(self, data: bytes | bytearray) -> None:
        seen = self._last + data
        if not self.done and _DONE in seen and _DONE_LINE.search(seen):
            self.done = True
        self._last = seen[-_KEPT:]

    @property
    def between_events(self) -> bool:
        """Whether the stream stands where another event may begin."""
        return self._last.endswith(_BLANK_LINE)


def event(document: Mapping[str, Any]) -> bytes:
    """One event carrying a JSON document."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def is_stream(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == CONTENT_TYPE
