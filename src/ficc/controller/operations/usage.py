"""What was used: records and sums of them, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from ficc.controller.operations.context import Context, Page, not_found, page_of
from ficc.controller.store import services as service_rows
from ficc.controller.store import usage as rows
from ficc.controller.store.usage import Grouping, Span
from ficc.domain.access import Actor
from ficc.domain.errors import invalid
from ficc.domain.usage import SECONDS_PER_DAY, Outcome
from ficc.protocol.http_api import rfc3339

SPAN_DAYS_DEFAULT = 30
"""Of sums and of CSV, unless the caller says from when."""
SPAN_DAYS_MAX = 400
"""That one sum goes over."""
GROUPS_MAX = 1000
"""Of one sum by token or service."""
CSV_PAGE_RECORDS = 2000
"""How many are read at a time."""

_EPOCH = date(1970, 1, 1)
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that spreadsheets take for a formula (OWASP, "CSV Injection")."""

RECORD_FIELDS = (
    *(
        "id",
        "request_id",
        "service_id",
        "alias",
        "credential",
        "credential_id",
        "subject_id",
        "path",
        "outcome",
    ),
    *("code", "status", "requests", "started_at", "queue_ms", "first_byte_ms", "total_ms", "tokens"),
    *("prompt_tokens", "completion_tokens", "model_revision", "plan_digest", "generation", "attempt_id"),
)
_SUMMED = (
    *("requests", *(outcome.value for outcome in Outcome)),
    *("prompt_tokens", "completion_tokens", "uncounted_requests"),
)
SUM_FIELDS: Mapping[Grouping, tuple[str, ...]] = {
    "day": ("day", *_SUMMED),
    "token": ("credential", "credential_id", "label", "subject_id", *_SUMMED),
    "service": ("service_id", "alias", *_SUMMED),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records: of one service or of the project, that began in [since, until) as the caller wrote it."""

    service_id: str | None = None
    since: str | None = None
    until: str | None = None


class Usage:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def page(self, actor: Actor, wanted: Wanted, page: Page) -> tuple[list[dict[str, Any]], str | None]:
        """Records, newest first."""
        span = await self._span(actor, wanted)
        found = await self._context.database.read(lambda c: rows.page(c, span, page.after, page.limit))
        shown, cursor = page_of(found, page, lambda row: str(row.id))
        return [_record_json(row) for row in shown], cursor

    async def sums(self, actor: Actor, wanted: Wanted, by: Grouping) -> list[dict[str, Any]]:
        """By day the newest first, else by tokens the most first."""
        span = self._bounded(await self._span(actor, wanted))
        assert span.begin is not None
        end = self._context.now() if span.end is None else span.end
        if end - span.begin > SPAN_DAYS_MAX * SECONDS_PER_DAY:
            raise invalid(f"One sum goes over at most {SPAN_DAYS_MAX} days; ask for less at a time.", "from")

        def work(connection: Connection) -> list[dict[str, Any]]:
            found = rows.sums(connection, span, by, GROUPS_MAX)
            if len(found) > GROUPS_MAX:
                raise invalid(f"There are more than {GROUPS_MAX} groups; ask for less time at once.", "from")
            labels: Mapping[str, str] = {}
            if by == "token":
                labels = rows.token_labels(connection, [row.authority_id for row in found])
            return [_sum_json(row, by, labels) for row in found]

        return await self._context.database.read(work)

    async def csv(self, actor: Actor, wanted: Wanted) -> AsyncIterator[str]:
        """Every record of the span as lines, page by page. Refuses before the first."""
        span = self._bounded(await self._span(actor, wanted))

        async def lines() -> AsyncIterator[str]:
            yield _line(RECORD_FIELDS)
            page = Page(None, CSV_PAGE_RECORDS)
            while True:
                after = page.after
                found = await self._context.database.read(
                    lambda c, after=after: rows.page(c, span, after, CSV_PAGE_RECORDS)  # type: ignore[misc]
                )
                shown, cursor = page_of(found, page, lambda row: str(row.id))
                yield "".join(_line(_record_json(row).values()) for row in shown)
                if cursor is None:
                    return
                page = replace(page, after=cursor)

        return lines()

    async def _span(self, actor: Actor, wanted: Wanted) -> Span:
        """Raises Refused."""
        actor.require("inference:read")
        service_id = wanted.service_id
        if service_id is not None:
            service = await self._context.database.read(
                lambda c: service_rows.get(c, actor.project_id, service_id)
            )
            if service is None:
                raise not_found("service", service_id)
        begin, end = _moment(wanted.since, "from"), _moment(wanted.until, "to")
        if begin is not None and end is not None and begin > end:
            raise invalid("from is later than to.", "from")
        return Span(actor.project_id, service_id, begin, end)

    def _bounded(self, span: Span) -> Span:
        if span.begin is not None:
            return span
        end = self._context.now() if span.end is None else span.end
        return replace(span, begin=max(0.0, end - SPAN_DAYS_DEFAULT * SECONDS_PER_DAY))


def sums_csv(found: Iterable[Mapping[str, Any]], by: Grouping) -> str:
    return _line(SUM_FIELDS[by]) + "".join(_line(one.values()) for one in found)


def _moment(text: str | None, param: str) -> float | None:
    """Seconds since 1970 of a time as RFC 3339 has it, or of the beginning of a day (UTC). Raises Refused."""
    if text is None:
        return None
    try:
        if _DATE.fullmatch(text):
            text += "T00:00:00Z"
        moment = datetime.fromisoformat(text)
        seconds = moment.timestamp()
    except (ValueError, OverflowError):
        moment, seconds = None, -1.0
    if moment is None or moment.tzinfo is None or seconds < 0:
        raise invalid(f"{param} is a day such as 2026-01-31, or a time such as 2026-01-31T12:00:00Z.", param)
    return seconds


def _record_json(row: Any) -> dict[str, Any]:
    return {
        "id": row.id,
        "request_id": row.request_id,
        "service_id": row.service_id,
        "alias": row.alias,
        "credential": row.authority_kind,
        "credential_id": row.authority_id,
        "subject_id": row.subject_id,
        "path": row.path,
        "outcome": row.outcome,
        "code": row.code,
        "status": row.status,
        "requests": row.requests,
        "started_at": rfc3339(row.started_at),
        "queue_ms": round(row.queue_ms, 3),
        "first_byte_ms": None if row.first_byte_ms is None else round(row.first_byte_ms, 3),
        "total_ms": round(row.total_ms, 3),
        "tokens": row.tokens,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "model_revision": row.model_revision,
        "plan_digest": row.plan_digest,
        "generation": row.generation,
        "attempt_id": row.attempt_id,
    }


def _sum_json(row: Any, by: Grouping, labels: Mapping[str, str]) -> dict[str, Any]:
    keys: dict[str, Any]
    if by == "day":
        keys = {"day": (_EPOCH + timedelta(days=row.day)).isoformat()}
    elif by == "token":
        keys = {
            "credential": row.authority_kind,
            "credential_id": row.authority_id,
            "label": labels.get(row.authority_id),
            "subject_id": row.subject_id,
        }
    else:
        keys = {"service_id": row.service_id, "alias": row.alias}
    return {
        **keys,
        "requests": int(row.requests),
        **{outcome.value: int(row._mapping[outcome.value]) for outcome in Outcome},
        "prompt_tokens": int(row.prompt_tokens),
        "completion_tokens": int(row.completion_tokens),
        "uncounted_requests": int(row.uncounted),
    }


def _line(cells: Iterable[Any] | Sequence[Any]) -> str:
    """RFC 4180, and no cell that a spreadsheet would compute."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow([_cell(cell) for cell in cells])
    return out.getvalue()


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
