"""Compressed request bodies: which codings are taken, and unpacking with a bound on every step.

Source: RFC 9110, section 8.4 (several fields are one list; `identity` is none), RFC 1952 (gzip), RFC 8878 and RFC 9659
(zstd, and the window that a body may ask for).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from typing import Literal

from ficc.domain.errors import Refused

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Coding = Literal["gzip", "zstd"]

TAKEN = "gzip, zstd"
STEP_BYTES_MAX = 1 << 20
"""What one step of unpacking makes at most: some milliseconds of work."""
WINDOW_BYTES_MAX = 8 << 20
"""What a decoder keeps of what it made: RFC 9659, section 3. That of gzip keeps 32 KiB."""
_NAMES: dict[bytes, Coding] = {b"gzip": "gzip", b"x-gzip": "gzip", b"zstd": "zstd"}
_GZIP_WINDOW_BITS = 31


def coding_of(fields: Sequence[bytes]) -> Coding | None:
    """What a body with these `Content-Encoding` fields is packed with. Raises Refused `unsupported_media_type` for
    whatever is not taken."""
    names = [name.strip().lower() for name in b",".join(fields).split(b",")]
    applied = [name for name in names if name not in (b"", b"identity")]
    if not applied:
        return None
    if len(applied) > 1 or applied[0] not in _NAMES:
        raise Refused(
            "unsupported_media_type",
            f"Send the body as it is, or packed once by one of: {TAKEN}.",
            "content-encoding",
        )
    return _NAMES[applied[0]]


class Unpacking:
    """One packed body, step by step, so that whoever unpacks it can stop at a bound of its own. It is one gzip member,
    or one zstd frame, and nothing else."""

    def __init__(self, coding: Coding, data: bytes) -> None:
        self._coding = coding
        self._decoder = zlib.decompressobj(_GZIP_WINDOW_BITS) if coding == "gzip" else _zstd_decoder()
        self._left = data

    def step(self) -> bytes:
        """The next of the plain bytes, at most STEP_BYTES_MAX; nothing at the end. Raises Refused."""
        if self._decoder.eof:
            return b""
        try:
            plain = self._decoder.decompress(self._left, STEP_BYTES_MAX)
        except (zlib.error, zstd.ZstdError):
            raise self._broken(f"is not {self._coding}, as its Content-Encoding says") from None
        # A decoder of zstd has no such member: it keeps by itself what it did not take.
        self._left = getattr(self._decoder, "unconsumed_tail", b"")
        if self._decoder.unused_data:
            raise self._broken(f"goes on behind the end of its {self._coding} stream")
        if not plain and not self._decoder.eof:
            raise self._broken(f"ends inside its {self._coding} stream")
        return plain

    def _broken(self, what: str) -> Refused:
        return Refused("invalid_body", f"The body {what}.", "content-encoding")


def _zstd_decoder() -> zstd.ZstdDecompressor:
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: WINDOW_BYTES_MAX.bit_length() - 1}
    return zstd.ZstdDecompressor(options=options)
