"""The management application: routers, error shapes, the OpenAPI document, the console's files."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from ficc import __version__
from ficc.controller.api import access, console, content, models, services, usage, workloads
from ficc.controller.api.caller import Callers
from ficc.controller.api.parts import Operations
from ficc.controller.api.strict import install_error_handlers, needs_caller

ROUTERS = (
    access.health,
    access.routes,
    access.nodes,
    models.routes,
    models.uploads,
    content.routes,
    services.routes,
    usage.routes,
    workloads.routes,
)
CREDENTIALS = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token that begins with ficc_, from POST /tokens.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "ficc_session",
        "description": "A browser's, from POST /session; named __Host-ficc_session over TLS. Every request that "
        "changes something also carries X-CSRF-Token.",
    },
}


def management_app(operations: Operations, callers: Callers) -> FastAPI:
    app = _application()
    app.state.operations = operations
    app.state.callers = callers
    app.router.routes.append(console.files())
    return app


def openapi_document() -> dict[str, Any]:
    """What `GET /api/v1/openapi.json` answers."""
    return _application().openapi()


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:  # made when somebody asks, and once
            self.openapi_schema = _with_credentials(super().openapi())
        return self.openapi_schema


def _application() -> FastAPI:
    app = _Application(
        title="ficc",
        version=__version__,
        summary="Private inference on machines people already have.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    install_error_handlers(app, ROUTERS)
    for router in ROUTERS:
        app.include_router(router)
    return app


def _with_credentials(document: dict[str, Any]) -> dict[str, Any]:
    """The document with what each route asks for: FastAPI cannot know, since callers are found before it
    looks at a request."""
    document["components"]["securitySchemes"] = CREDENTIALS
    for router in ROUTERS:
        for route in router.routes:
            if isinstance(route, APIRoute) and needs_caller(route.dependant):
                for method in route.methods or ():
                    operation = document["paths"][route.path][method.lower()]
                    operation["security"] = [{name: []} for name in CREDENTIALS]
    return document
