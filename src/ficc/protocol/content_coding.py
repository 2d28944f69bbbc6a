"""Compressed request bodies: which codings are taken, and unpacking with a bound on every step.

Source: RFC 9110, section 8.4 (several fields are one list; `identity` is none), RFC 1952 (gzip).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from ficc.domain.errors import Refused

TAKEN = "gzip"
STEP_BYTES_MAX = 1 << 20
"""What one step of unpacking makes at most: some milliseconds of work."""
_GZIP = frozenset({b"gzip", b"x-gzip"})
_GZIP_WINDOW_BITS = 31


def is_packed(codings: Sequence[bytes]) -> bool:
    """Whether a body with these `Content-Encoding` fields is gzip. Raises Refused `unsupported_media_type`
    for whatever else."""
    names = [name.strip().lower() for name in b",".join(codings).split(b",")]
    applied = [name for name in names if name not in (b"", b"identity")]
    if len(applied) > 1 or not _GZIP.issuperset(applied):
        raise Refused(
            "unsupported_media_type", f"Send the body as it is, or as {TAKEN}, once.", "content-encoding"
        )
    return bool(applied)


class Unpacking:
    """One gzip body, step by step, so that whoever unpacks it can stop at a bound of its own."""

    def __init__(self, data: bytes) -> None:
        self._decoder = zlib.decompressobj(_GZIP_WINDOW_BITS)
        self._left = data

    def step(self) -> bytes:
        """The next of the plain bytes, at most STEP_BYTES_MAX; nothing at the end. Raises Refused."""
        if self._decoder.eof:
            return b""
        try:
            plain = self._decoder.decompress(self._left, STEP_BYTES_MAX)
        except zlib.error:
            raise _broken("is not gzip, as its Content-Encoding says") from None
        self._left = self._decoder.unconsumed_tail
        if self._decoder.unused_data:
            raise _broken("goes on behind the end of its gzip stream")
        if not plain and not self._decoder.eof:
            raise _broken("ends inside its gzip stream")
        return plain


def _broken(what: str) -> Refused:
    return Refused("invalid_body", f"The body {what}.", "content-encoding")
