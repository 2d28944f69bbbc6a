"""Usage records: what was asked of services, one row for each request (or for a flood of refusals of one kind)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, Select, case, delete, func, select

from ficc.controller.store import schema
from ficc.controller.store.database import Transaction
from ficc.domain import ids
from ficc.domain.usage import Counted, Outcome, Record

CLOCKS_APART_SECONDS = 1.0
"""By which the time in a record's id and the time that it says it began differ at most."""
STATEMENT_RECORDS_MAX = 256
"""Of one statement: far fewer values than a statement of SQLite (32,766) or PostgreSQL (65,535) may have."""
Grouping = Literal["day", "token", "service"]

_u = schema.usage_records.c
_NAMES = tuple(column.name for column in schema.usage_records.columns)
assert Record._fields == _NAMES  # a row is a record as it is


@dataclass(frozen=True, slots=True)
class Span:
    """Which records: of a project, of one of its services, that began in [begin, end), seconds since 1970."""

    project_id: str
    service_id: str | None = None
    begin: float | None = None
    end: float | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = [_u.project_id == self.project_id]
        if self.service_id is not None:
            found.append(_u.service_id == self.service_id)
        if self.begin is not None:
            found += [_u.started_at >= self.begin, _u.id >= first_id(self.begin - CLOCKS_APART_SECONDS)]
        if self.end is not None:
            found += [_u.started_at < self.end, _u.id < first_id(self.end + CLOCKS_APART_SECONDS)]
        return found


def first_id(at: float) -> str:
    """The least id that can have been made at a time."""
    return ids.make(max(0, int(at * 1000)), bytes(ids.RANDOM_BYTES))


def add(tx: Transaction, records: Sequence[Record]) -> None:
    """Write records, each once however often it is written. In the driver's own words, as it is done thousands of
    times a second, and many rows in each statement: for each statement a thread lets go of the interpreter, and a busy
    event loop gives it back after milliseconds only."""
    mark = "?" if tx.connection.dialect.name == "sqlite" else "%s"
    row = f"({', '.join([mark] * len(_NAMES))})"
    at, rows = 0, STATEMENT_RECORDS_MAX
    while at < len(records):
        while rows > len(records) - at:
            rows //= 2  # few different statements, which drivers keep prepared
        values: list[Any] = []
        for r in records[at : at + rows]:
            values += (*r[:9], r.outcome.value, *r[10:17], r.tokens.value, *r[18:])
        tx.connection.exec_driver_sql(
            f"INSERT INTO usage_records ({', '.join(_NAMES)}) "  # noqa: S608  # names of our own
            f"VALUES {', '.join([row] * rows)} ON CONFLICT DO NOTHING",
            tuple(values),
        )
        at += rows


def page(connection: Connection, span: Span, after: str | None, limit: int) -> Sequence[Row[Any]]:
    """Newest first, one more than `limit` if there are more."""
    query = select(schema.usage_records).where(*span.conditions())
    if after is not None:
        query = query.where(_u.id < after)
    return connection.execute(query.order_by(_u.id.desc()).limit(limit + 1)).all()


def sums(connection: Connection, span: Span, by: Grouping, limit: int) -> Sequence[Row[Any]]:
    """By day the newest first, else by tokens the most first; one more than `limit` if there are more."""
    keys: dict[Grouping, tuple[ColumnElement[Any], ...]] = {
        "day": (_u.day,),
        "token": (_u.authority_kind, _u.authority_id, _u.subject_id),
        "service": (_u.service_id,),
    }
    tokens = func.coalesce(func.sum(_u.prompt_tokens), 0), func.coalesce(func.sum(_u.completion_tokens), 0)
    query: Select[Any] = select(
        *keys[by],
        func.max(_u.alias).label("alias"),
        func.sum(_u.requests).label("requests"),
        *(_requests(_u.outcome == outcome.value).label(outcome.value) for outcome in Outcome),
        tokens[0].label("prompt_tokens"),
        tokens[1].label("completion_tokens"),
        _requests(_u.tokens.in_((Counted.PARTIAL.value, Counted.UNKNOWN.value))).label("uncounted"),
    ).where(*span.conditions())
    first = _u.day.desc() if by == "day" else (tokens[0] + tokens[1]).desc()
    query = query.group_by(*keys[by]).order_by(first, *keys[by]).limit(limit + 1)
    return connection.execute(query).all()


def _requests(condition: ColumnElement[bool]) -> ColumnElement[Any]:
    return func.sum(case((condition, _u.requests), else_=0))


def token_labels(connection: Connection, token_ids: Sequence[str]) -> dict[str, str]:
    """Of those tokens that there are."""
    t = schema.tokens.c
    return {row.id: row.label for row in connection.execute(select(t.id, t.label).where(t.id.in_(token_ids)))}


def purge(tx: Transaction, before: float, limit: int) -> int:
    """Remove the oldest records that began before a time; how many, at most `limit`."""
    oldest = select(_u.id).where(_u.id < first_id(before)).order_by(_u.id).limit(limit).scalar_subquery()
    return tx.execute(delete(schema.usage_records).where(_u.id.in_(oldest))).rowcount
