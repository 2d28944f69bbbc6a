"""What the route modules share: the operations they call, paging, and the answers they declare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import AfterValidator, BeforeValidator

from ficc.controller.api.shapes import ErrorAnswer
from ficc.controller.api.strict import StrictRoute
from ficc.controller.operations.access import Access
from ficc.controller.operations.acquisitions import Acquisitions
from ficc.controller.operations.audit import AuditReads
from ficc.controller.operations.context import PAGE_DEFAULT, PAGE_MAX, Page
from ficc.controller.operations.eviction import Eviction
from ficc.controller.operations.health import Health
from ficc.controller.operations.hub import HubPreviews
from ficc.controller.operations.models import Models
from ficc.controller.operations.nodes import NodeReads
from ficc.controller.operations.services import Services
from ficc.controller.operations.usage import Usage
from ficc.controller.operations.workloads import Workloads
from ficc.domain import ids
from ficc.domain.errors import Refused
from ficc.inference.schema import ID_PATTERN


@dataclass(frozen=True, slots=True)
class Operations:
    """Every use case of the management API."""

    health: Health
    access: Access
    models: Models
    acquisitions: Acquisitions
    hub: HubPreviews
    eviction: Eviction
    services: Services
    usage: Usage
    nodes: NodeReads
    workloads: Workloads
    audit: AuditReads


def _operations(request: Request) -> Operations:
    operations: Operations = request.app.state.operations
    return operations


Ops = Annotated[Operations, Depends(_operations)]


def _an_id(text: str) -> str:
    if not ids.is_id(text):
        raise Refused("not_found", f"There is no object {text[:64]!r}; an id has {ids.LENGTH} characters.")
    return text


def _plain_decimal(value: object) -> object:
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        raise ValueError("Input should be a decimal number")  # and not 1_0, +1 or 1.0
    return value


IdPath = Annotated[str, AfterValidator(_an_id), Path(description=f"An id: {ID_PATTERN}")]
PLAIN_DECIMAL = BeforeValidator(_plain_decimal)


def _page(
    limit: Annotated[int, PLAIN_DECIMAL, Query(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT,
    after: Annotated[str | None, Query(pattern=ID_PATTERN, description="`next` of the page before.")] = None,
) -> Page:
    return Page(after, limit)


Paging = Annotated[Page, Depends(_page)]

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "Refused; the code says why and the message what to do."},
    "5XX": {"model": ErrorAnswer, "description": "A fault of ours, or of what we depend on."},
}


def router(tag: str, route_class: type[StrictRoute] = StrictRoute) -> APIRouter:
    return APIRouter(
        prefix="/api/v1", tags=[tag], route_class=route_class, responses=_ERRORS, redirect_slashes=False
    )


def listed(items: list[Any], cursor: str | None) -> dict[str, Any]:
    return {"items": items, "next": cursor}
