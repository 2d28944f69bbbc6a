"""Canonical JSON (RFC 8785) and its SHA-256: the one way here to give a document an identity."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import rfc8785

INTEGER_MAX = 2**53 - 1
"""The largest integer that every JSON reader keeps exact (RFC 8785, section 3.2.2.3; ECMAScript)."""


def without_absent(value: Any) -> Any:
    """The value with every null member dropped, at any depth: null equals absent."""
    if isinstance(value, Mapping):
        return {key: without_absent(member) for key, member in value.items() if member is not None}
    if isinstance(value, (list, tuple)):
        return [without_absent(member) for member in value]
    return value


def encode(document: Mapping[str, Any]) -> bytes:
    """The canonical bytes. Floats are refused (TypeError): their text form is where readers differ."""
    _refuse_floats(document)
    return rfc8785.dumps(without_absent(document))


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical bytes, 64 lower-case hex characters."""
    return hashlib.sha256(encode(document)).hexdigest()


def _refuse_floats(value: Any) -> None:
    if isinstance(value, float):
        raise TypeError("canonical documents hold no floats")
    if isinstance(value, Mapping):
        for member in value.values():
            _refuse_floats(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            _refuse_floats(member)
