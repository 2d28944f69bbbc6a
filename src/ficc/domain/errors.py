"""Refusals: the one exception by which a decision says no.

A refusal has a stable `code` (the codes are listed in `ficc.protocol.http_api.CODES`, which also maps
them to HTTP), a message that says what to do next, and, where one field is at fault, its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is as it is: shown to people, stored with records."""

    code: str
    message: str

    def as_json(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


@dataclass(eq=False)
class Refused(Exception):
    """The request cannot be met.

    `details` are further members of the `error` object (digests, offsets, sizes), `beside` are members
    of the answer beside `error` (the durable offset of an upload, a new preview).
    """

    code: str
    message: str
    param: str | None = None
    retry_after_seconds: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @property
    def reason(self) -> Reason:
        return Reason(self.code, self.message)


def invalid(message: str, param: str | None = None) -> Refused:
    """A request whose shape or values break a stated rule (422)."""
    return Refused("invalid_request", message, param)
