"""Eviction: what removing a model frees, what stays of it, and what forbids it.

A model's bytes are those of its distinct digests. Bytes that another model of the project needs stay; so do
bytes that another project has proved to have, though this project gives them up. What is on its way to a
digest is the project's own, and goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ficc.domain.errors import Reason, Refused
from ficc.domain.upload import Record, State


@dataclass(frozen=True, slots=True)
class Holding:
    """What a project has of one digest, and who else wants it."""

    record: Record
    needed: bool
    """Another model of the project has a file of this digest."""
    elsewhere: bool
    """Another project has it, verified."""

    @property
    def verified(self) -> bool:
        return self.record.state is State.VERIFIED

    @property
    def bytes_freed(self) -> int:
        """By giving it up: what leaves the disk."""
        return 0 if self.verified and self.elsewhere else self.record.offset


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a removal comes to. `dropped` are the digests that the project gives up."""

    dropped: frozenset[str]
    bytes_freed: int
    bytes_retained_shared: int


def outcome(holdings: Iterable[Holding], *, evict: bool) -> Outcome:
    """Of removing a model that has these, which are each of a digest of its own. Without `evict` what is
    verified stays the project's, so that the model is ready at once when it is registered again."""
    dropped, freed, total = set(), 0, 0
    for holding in holdings:
        total += holding.record.offset
        if not holding.needed and (evict or not holding.verified):
            dropped.add(holding.record.sha256)
            freed += holding.bytes_freed
    return Outcome(frozenset(dropped), freed, total - freed)


@dataclass(frozen=True, slots=True)
class Holders:
    """Who forbids it."""

    services: tuple[str, ...] = ()
    """Every service of the model, whatever its state: its next start reads these bytes."""
    attempts: tuple[str, ...] = ()
    """Attempts that were not released and read what would be dropped."""
    writing: bool = False
    """The model is being downloaded, or somebody writes or verifies what would be dropped."""

    @property
    def reason(self) -> Reason | None:
        """Why the model cannot be removed now, if so."""
        if self.services:
            return Reason(
                "model_referenced",
                f"Services refer to the model: {', '.join(self.services)}. Remove them first.",
            )
        if self.attempts:
            return Reason(
                "model_referenced",
                f"Attempts read the model: {', '.join(self.attempts)}. Wait until they are released.",
            )
        if self.writing:
            return Reason(
                "model_busy", "The model is being written; pause its download, or try again in a moment."
            )
        return None

    def check(self) -> None:
        """Raises Refused `model_referenced`, `model_busy`."""
        reason = self.reason
        if reason is None:
            return
        details = {"services": list(self.services), "attempts": list(self.attempts)}
        if reason.code == "model_referenced":
            raise Refused(reason.code, reason.message, details={k: v for k, v in details.items() if v})
        raise Refused(reason.code, reason.message, retry_after_seconds=1)
