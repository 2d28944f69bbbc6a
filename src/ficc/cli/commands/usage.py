"""Usage: what the project's callers, or one service, were asked and answered."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc.cli import connection, output
from ficc.cli.options import Json

if TYPE_CHECKING:
    from ficc.client.api import Api

ID_SHOWN = 8
"""The last characters of an id: those that differ."""


class By(StrEnum):
    DAY = "day"
    TOKEN = "token"  # noqa: S105  # a word
    SERVICE = "service"


Grouping = Annotated[By, typer.Option("--by", help="What the sums are of.")]
Since = Annotated[
    str | None, typer.Option("--from", help="A day or a time (RFC 3339); 30 days ago by default.")
]
Until = Annotated[str | None, typer.Option("--to", help="A day or a time, not included.")]


def of_project(
    by: Grouping = By.DAY, since: Since = None, until: Until = None, as_json: Json = False
) -> None:
    """Requests and tokens of the whole project, summed."""

    async def work(api: Api) -> Any:
        return await api.call("GET", "/usage", query=_query(by, since, until))

    _show(connection.with_api(work), by, as_json)


def of_service(
    service: str, by: Grouping = By.DAY, since: Since = None, until: Until = None, as_json: Json = False
) -> None:
    """Requests to a service and their tokens, summed."""

    async def work(api: Api) -> Any:
        found = await connection.resolve(api, "/inference", service, "alias")
        return await api.call("GET", f"/inference/{found['id']}/usage", query=_query(by, since, until))

    _show(connection.with_api(work), by, as_json)


def _query(by: By, since: str | None, until: str | None) -> dict[str, str]:
    given = {"group_by": by.value, "from": since, "to": until}
    return {name: value for name, value in given.items() if value is not None}


def _show(answer: dict[str, Any], by: By, as_json: bool) -> None:
    if as_json:
        output.show_json(answer)
        return
    rows = [
        [
            _name(one, by),
            *(one[name] for name in ("requests", "completed", "refused", "failed", "client_gone")),
            *(one[name] for name in ("prompt_tokens", "completion_tokens", "uncounted_requests")),
        ]
        for one in answer["items"]
    ]
    columns = [by.value.upper(), "REQUESTS", "COMPLETED", "REFUSED", "FAILED", "LEFT"]
    columns += ["PROMPT TOKENS", "COMPLETION TOKENS", "UNCOUNTED"]
    output.show_table(columns, rows, "No requests in that time.")


def _name(one: dict[str, Any], by: By) -> Any:
    if by is By.DAY:
        return one["day"]
    if by is By.SERVICE:
        return one["alias"] or "(no service)"
    return one["label"] or f"{one['credential']} …{one['credential_id'][-ID_SHOWN:]}"
