"""Inference services: preview, create, read, replace, control, tokens, logs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Request

from ficc.controller.api import shapes
from ficc.controller.api.caller import Caller, Callers
from ficc.controller.api.parts import IdPath, Ops, Paging, listed, router
from ficc.inference.schema import PLACEMENTS_MAX, Specification

routes = router("inference")


@routes.get("/inference", response_model=shapes.Page[shapes.Service])
async def list_services(actor: Caller, operations: Ops, page: Paging) -> dict[str, Any]:
    """Services with their replicas, newest first. Scope: inference:read."""
    found, cursor = await operations.services.page(actor, page)
    return listed([view.as_json() for view in found], cursor)


@routes.get("/inference/{service_id}", response_model=shapes.Service)
async def get_service(actor: Caller, operations: Ops, service_id: IdPath) -> dict[str, Any]:
    """Specification, generation, state and replicas. Scope: inference:read."""
    return (await operations.services.get(actor, service_id)).as_json()


@routes.post("/inference/preview", response_model=shapes.Preview)
async def preview_service(actor: Caller, operations: Ops, spec: Specification) -> dict[str, Any]:
    """What a submission would reserve and run; writes nothing. Scope: inference:manage."""
    return (await operations.services.preview(actor, spec)).as_json()


@routes.post("/inference", response_model=shapes.Service, status_code=202)
async def create_service(actor: Caller, operations: Ops, spec: shapes.CreateService) -> dict[str, Any]:
    """Submit every replica, or nothing. Scopes: inference:manage, jobs:execute, contributors:read,
    models:read."""
    specification = Specification.model_validate(spec.model_dump(exclude={"preview_digest"}))
    view = await operations.services.create(actor, specification, spec.preview_digest)
    return view.as_json()


@routes.put("/inference/{service_id}", response_model=shapes.Service, status_code=202)
async def replace_service(
    actor: Caller, operations: Ops, service_id: IdPath, change: shapes.ReplaceService
) -> dict[str, Any]:
    """Replace the specification of a stopped or failed service and start its next generation. Scopes as for
    creating one."""
    view = await operations.services.replace(
        actor,
        service_id,
        change.revision,
        change.spec,
        acknowledge_unknown=bool(change.acknowledge_unknown),
    )
    return view.as_json()


@routes.post(
    "/inference/{service_id}/control/{action}",
    response_model=shapes.Service | shapes.Removed,
    status_code=202,
)
async def control_service(
    actor: Caller,
    operations: Ops,
    service_id: IdPath,
    action: Annotated[str, Path(max_length=16, description="start, drain, stop or remove")],
    control: shapes.ControlService,
) -> dict[str, Any]:
    """Act on a service at the revision that was read. Start needs the scopes of creating one, the others
    inference:manage and jobs:cancel."""
    view = await operations.services.control(
        actor, service_id, action, control.revision, control.acknowledge_unknown
    )
    return {"removed": True} if view is None else view.as_json()


@routes.post("/inference/{service_id}/tokens", response_model=shapes.ServiceToken, status_code=201)
async def create_service_token(
    actor: Caller, operations: Ops, service_id: IdPath, token: shapes.CreateServiceToken, request: Request
) -> dict[str, Any]:
    """A credential that can invoke this one service; its secret is in this answer only. Scopes:
    inference:manage, inference:invoke, tokens:manage."""
    callers: Callers = request.app.state.callers
    return await operations.services.create_token(actor, service_id, token.lifetime, callers.origin(request))


@routes.get("/inference/{service_id}/logs", response_model=shapes.LogAnswer)
async def get_log(
    actor: Caller,
    operations: Ops,
    service_id: IdPath,
    replica: Annotated[int, Query(ge=0, lt=PLACEMENTS_MAX)] = 0,
    attempt: Annotated[int | None, Query(ge=1, le=2**53 - 1, description="Its number.")] = None,
    generation: Annotated[int | None, Query(ge=1, le=2**53 - 1, description="The current one.")] = None,
) -> dict[str, Any]:
    """The newest part of the engine's log of a replica's newest attempt, or of one of its five latest.
    Scope: jobs:logs."""
    return await operations.services.log(actor, service_id, replica, attempt, generation)
