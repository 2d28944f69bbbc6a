"""What every operation stands on: the database, settings, and where time and chance come from."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ficc.controller.store.database import Database
from ficc.domain import ids
from ficc.domain.errors import Refused
from ficc.settings import Settings

PAGE_MAX = 200
PAGE_DEFAULT = 50

T = TypeVar("T")


def new_id() -> str:
    return ids.make(time.time_ns() // 1_000_000, os.urandom(ids.RANDOM_BYTES))


@dataclass(frozen=True, slots=True)
class Context:
    settings: Settings
    database: Database
    now: Callable[[], float] = field(default=time.time)
    new_id: Callable[[], str] = field(default=new_id)
    new_secret: Callable[[], str] = field(default=lambda: secrets.token_urlsafe(32))
    """256 random bits as text."""


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


Json = dict[str, Any]
