"""Identifiers: ULIDs in lower case, 26 characters, sortable by the time they were made.

Source: the ULID specification (48-bit milliseconds, 80 random bits, Crockford base 32).
"""

from __future__ import annotations

import re
import struct

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_BASE_32 = str.maketrans(ALPHABET, "0123456789abcdefghijklmnopqrstuv")
"""To the digits that `int` knows."""
_FORM = re.compile(rf"[0-7][{ALPHABET}]{{25}}")
_PAIRS = [first + second for first in ALPHABET for second in ALPHABET]
_HALVES = struct.Struct(">QQ").unpack
LENGTH = 26
RANDOM_BYTES = 10


def make(now_ms: int, randomness: bytes) -> str:
    """An identifier from milliseconds since 1970 and 10 random bytes."""
    if len(randomness) != RANDOM_BYTES:
        raise ValueError(f"an identifier takes {RANDOM_BYTES} random bytes")
    return from_bytes(now_ms.to_bytes(6, "big") + randomness)


def from_bytes(raw: bytes) -> str:
    """The 26-character form of 16 bytes."""
    if len(raw) != 16:
        raise ValueError("an identifier has 16 bytes")
    high, low = _HALVES(raw)  # two machine words, written out: ids are made for every request
    return (
        f"{_PAIRS[high >> 56]}{_PAIRS[high >> 46 & 1023]}{_PAIRS[high >> 36 & 1023]}"
        f"{_PAIRS[high >> 26 & 1023]}{_PAIRS[high >> 16 & 1023]}{_PAIRS[high >> 6 & 1023]}"
        f"{_PAIRS[(high & 63) << 4 | low >> 60]}{_PAIRS[low >> 50 & 1023]}{_PAIRS[low >> 40 & 1023]}"
        f"{_PAIRS[low >> 30 & 1023]}{_PAIRS[low >> 20 & 1023]}{_PAIRS[low >> 10 & 1023]}{_PAIRS[low & 1023]}"
    )


def to_bytes(text: str) -> bytes:
    """The 16 bytes of an identifier. Raises ValueError when it is none."""
    if not is_id(text):
        raise ValueError(f"not an identifier: {text[:40]!r}")
    return int(text.translate(_BASE_32), 32).to_bytes(16, "big")


def is_id(text: str) -> bool:
    """Whether the text has the form of an identifier (its first character is at most 7: 128 bits)."""
    return _FORM.fullmatch(text) is not None
