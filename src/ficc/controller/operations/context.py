"""What every operation stands on: the database, settings, and where time and chance come from."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ficc import clock
from ficc.controller.store.database import Database
from ficc.domain import lease
from ficc.domain.errors import Refused
from ficc.identifiers import new_id
from ficc.settings import Settings

PAGE_MAX = 200
PAGE_DEFAULT = 50

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    database: Database
    now: Callable[[], float] = field(default=time.time)
    new_id: Callable[[], str] = field(default=new_id)
    new_secret: Callable[[], str] = field(default=lambda: secrets.token_urlsafe(32))
    """256 random bits as text."""
    lease_clock: Callable[[], tuple[str, int]] = field(default=lambda: (clock.boot_id(), clock.now_ns()))
    """This controller's boot id and CLOCK_BOOTTIME in ns: no jump of the wall clock ends or prolongs a lease."""

    def believe(self, ttl_seconds: int) -> lease.Belief:
        """What is to be recorded of a lease before it is sent."""
        boot_id, now_ns = self.lease_clock()
        return lease.Belief(boot_id, lease.over_for_grantor(now_ns, ttl_seconds), ttl_seconds)


@dataclass(frozen=True, slots=True)
class Page:
    """How a list is asked for: at most `limit` objects older than `after`."""

    after: str | None = None
    limit: int = PAGE_DEFAULT


def page_of(items: Sequence[T], page: Page, id_of: Callable[[T], str]) -> tuple[Sequence[T], str | None]:
    """What is shown, and the cursor of what follows, from one item more than was asked for."""
    shown = items[: page.limit]
    return shown, id_of(shown[-1]) if len(items) > page.limit else None


def not_found(what: str, given: str) -> Refused:
    return Refused("not_found", f"There is no {what} {given[:64]} in this project.")


def check_revision(found: int, given: int) -> None:
    if found != given:
        raise Refused(
            "revision_conflict",
            f"The object is at revision {found}, not {given}; read it again and decide anew.",
            "revision",
            details={"revision": found},
        )
