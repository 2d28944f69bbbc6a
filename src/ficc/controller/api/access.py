"""Signing in, tokens, projects, nodes, health."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from ficc.controller.api import shapes
from ficc.controller.api.caller import Caller, Callers
from ficc.controller.api.parts import IdPath, Ops, Paging, listed, router
from ficc.controller.operations.access import SESSION_SECONDS, csrf_token

routes = router("access")
nodes = router("nodes")
health = router("health")


@health.get("/health", response_model=shapes.Health)
async def get_health(operations: Ops) -> dict[str, Any]:
    """Whether the database answers. No credential needed."""
    return await operations.health.check()


@routes.post("/session", response_model=shapes.Session)
async def sign_in(
    operations: Ops, code: shapes.SignIn, request: Request, response: Response
) -> dict[str, Any]:
    """Exchange a one-use sign-in code for a session cookie."""
    callers: Callers = request.app.state.callers
    callers.check_browser(request)
    signed_in = await operations.access.sign_in(code.code)
    response.set_cookie(
        callers.cookie,
        signed_in.secret,
        max_age=SESSION_SECONDS,
        path="/",
        httponly=True,
        samesite="strict",
        secure=callers.secure,
    )
    return {**await operations.access.session(signed_in.actor), "csrf": signed_in.csrf}


@routes.get("/session", response_model=shapes.Session)
async def get_session(actor: Caller, operations: Ops, request: Request) -> dict[str, Any]:
    """Who the caller is: principal, project, scopes."""
    callers: Callers = request.app.state.callers
    secret = callers.session_secret(request) if actor.kind == "session" else None
    csrf = None if secret is None else csrf_token(secret)
    return {**await operations.access.session(actor), "csrf": csrf}


@routes.delete("/session", response_model=shapes.Removed)
async def sign_out(actor: Caller, operations: Ops, request: Request, response: Response) -> dict[str, Any]:
    """End the caller's session, or revoke the caller's own token."""
    callers: Callers = request.app.state.callers
    await operations.access.sign_out(actor)
    response.delete_cookie(callers.cookie, path="/", secure=callers.secure, samesite="strict")
    return {"removed": True}


@routes.post("/session/codes", response_model=shapes.Code, status_code=201)
async def create_code(actor: Caller, operations: Ops, request: Request) -> dict[str, Any]:
    """A one-use sign-in code for the caller, and the link that carries it. Scope: tokens:manage."""
    callers: Callers = request.app.state.callers
    code = await operations.access.code_for(actor)
    return {"code": code, "url": f"{callers.origin(request)}/#code={code}"}


@routes.get("/projects", response_model=shapes.Page[shapes.Project])
async def list_projects(actor: Caller, operations: Ops) -> dict[str, Any]:
    """The projects that the caller is a member of."""
    return listed(await operations.access.projects(actor), None)


@routes.get("/tokens", response_model=shapes.Page[shapes.Token])
async def list_tokens(actor: Caller, operations: Ops, page: Paging) -> dict[str, Any]:
    """Tokens of the project, without their secrets. Scope: tokens:manage."""
    return listed(*await operations.access.tokens(actor, page))


@routes.post("/tokens", response_model=shapes.CreatedToken, status_code=201)
async def create_token(actor: Caller, operations: Ops, token: shapes.CreateToken) -> dict[str, Any]:
    """A token with some of the caller's scopes; its secret is in this answer only. Scope: tokens:manage."""
    limits = None if token.limits is None else token.limits.model_dump(exclude_none=True)
    return await operations.access.create_token(
        actor,
        label=token.label,
        scopes=token.scopes,
        lifetime_seconds=token.lifetime_seconds,
        limits=limits,
    )


@routes.delete("/tokens/{token_id}", response_model=shapes.Removed)
async def revoke_token(actor: Caller, operations: Ops, token_id: IdPath) -> dict[str, Any]:
    """Revoke a token at once, also for answers that are under way. Scope: tokens:manage."""
    await operations.access.revoke_token(actor, token_id)
    return {"removed": True}


@nodes.get("/contributors", response_model=shapes.Page[shapes.Node])
async def list_nodes(actor: Caller, operations: Ops, page: Paging) -> dict[str, Any]:
    """Nodes: connection, capacity, what is reserved and available, runtimes. Scope: contributors:read."""
    return listed(*await operations.nodes.page(actor, page))


@nodes.get("/contributors/{node_id}", response_model=shapes.Node)
async def get_node(actor: Caller, operations: Ops, node_id: IdPath) -> dict[str, Any]:
    """One node. Scope: contributors:read."""
    return await operations.nodes.get(actor, node_id)
