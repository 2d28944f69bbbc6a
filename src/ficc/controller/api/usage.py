"""What was used: records of requests, and sums of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from ficc.controller.api import shapes
from ficc.controller.api.caller import Caller
from ficc.controller.api.parts import IdPath, Ops, Paging, listed, router
from ficc.controller.operations.context import Page
from ficc.controller.operations.usage import Wanted, sums_csv
from ficc.controller.store.usage import Grouping
from ficc.domain.access import Actor
from ficc.domain.errors import invalid

routes = router("usage")

CSV_TYPE = "text/csv; charset=utf-8; header=present"
TIME_CHARACTERS_MAX = 40


class _Question:
    """How records are asked for."""

    def __init__(
        self,
        request: Request,
        since: Annotated[
            str | None,
            Query(
                alias="from",
                max_length=TIME_CHARACTERS_MAX,
                description="Requests that began then or later: a day (UTC) or a time, RFC 3339.",
            ),
        ] = None,
        until: Annotated[
            str | None,
            Query(alias="to", max_length=TIME_CHARACTERS_MAX, description="Requests that began before then."),
        ] = None,
        group_by: Annotated[
            Literal["day", "token", "service"] | None,
            Query(description="Sums instead of records; of the last 30 days, unless `from` says otherwise."),
        ] = None,
        format: Annotated[  # the name of the parameter
            Literal["json", "csv"] | None,
            Query(description="Or `Accept: text/csv`. CSV has every record of the span, not a page of them."),
        ] = None,
    ) -> None:
        self.since, self.until, self.by = since, until, group_by
        accepts = request.headers.get("accept", "").partition(";")[0].strip().lower()
        self.csv = format == "csv" or (format is None and accepts == "text/csv")


Question = Annotated[_Question, Depends(_Question)]

_CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}, "description": "Records, or sums."}
}


@routes.get("/usage", response_model=shapes.UsagePage, responses=_CSV)
async def project_usage(
    actor: Caller, operations: Ops, question: Question, page: Paging
) -> dict[str, Any] | Response:
    """Requests of the project's callers, newest first, or their sums. Scope: inference:read."""
    return await _answer(actor, operations, question, page, None)


@routes.get("/inference/{service_id}/usage", response_model=shapes.UsagePage, responses=_CSV)
async def service_usage(
    actor: Caller, operations: Ops, service_id: IdPath, question: Question, page: Paging
) -> dict[str, Any] | Response:
    """Requests that one service was asked, newest first, or their sums. Scope: inference:read."""
    return await _answer(actor, operations, question, page, service_id)


async def _answer(
    actor: Actor, operations: Ops, question: _Question, page: Page, service_id: str | None
) -> dict[str, Any] | Response:
    wanted = Wanted(service_id, question.since, question.until)
    by: Grouping | None = question.by
    if by is not None and page.after is not None:
        raise invalid("Sums come in one answer; leave after out.", "after")
    if by is not None:
        sums = await operations.usage.sums(actor, wanted, by)
        return Response(sums_csv(sums, by), media_type=CSV_TYPE) if question.csv else listed(sums, None)
    if question.csv:
        return StreamingResponse(await operations.usage.csv(actor, wanted), media_type=CSV_TYPE)
    return listed(*await operations.usage.page(actor, wanted, page))
