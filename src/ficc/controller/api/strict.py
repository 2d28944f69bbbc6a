"""How strictly the management API reads: no unknown query parameters or members, no duplicate keys, bounded
bodies, one content type, and every refusal in the one shape."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ficc.controller.api.caller import authenticate, the_caller
from ficc.domain.errors import Refused, invalid
from ficc.inference.schema import PATTERN_WORDS
from ficc.protocol import http_api, strict_json

BODY_BYTES_MAX = 1 << 20
PATH_SHOWN_CHARACTERS = 128
UPLOAD_JSON_BYTES_MAX = (1 << 20) * 4 // 3 + 4096
"""The base64 of 1 MiB, and the members around it."""


class StrictRequest(Request):
    """A request whose body is bounded and whose JSON is strict."""

    body_bytes_max = BODY_BYTES_MAX

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            declared = self.headers.get("content-length")
            if declared is not None and int(declared) > self.body_bytes_max:
                raise self._too_large()
            body = bytearray()
            async for chunk in self.stream():
                body += chunk
                if len(body) > self.body_bytes_max:
                    raise self._too_large()
            self._body = bytes(body)
        return self._body

    def _too_large(self) -> Refused:
        return Refused("too_large", f"The body of this route is at most {self.body_bytes_max} bytes.")

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = strict_json.parse(await self.body())
            except strict_json.NotJson as error:
                raise Refused("invalid_json", f"The body cannot be taken: {error}.", error.place) from None
        return self._json


class StrictRoute(APIRoute):
    request_class = StrictRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        original = super().get_route_handler()
        known = _query_names(self.dependant)
        takes_json = self.body_field is not None
        asks_who = needs_caller(self.dependant)

        async def handle(request: Request) -> Response:
            if asks_who:
                authenticate(request)
            _check_query(request, known)
            strict = self.request_class(request.scope, request.receive)
            if takes_json:
                check_content_type(request, "application/json")
                await strict.json()  # read here: FastAPI would turn our refusals into its own
            return await original(strict)

        return handle


class UploadRoute(StrictRoute):
    """A route whose JSON holds a piece of a file."""

    class request_class(StrictRequest):  # noqa: N801  # replaces the attribute of the base
        body_bytes_max = UPLOAD_JSON_BYTES_MAX


def needs_caller(dependant: Dependant) -> bool:
    """Whether a route is for authenticated callers only."""
    return any(one.call is the_caller for one in dependant.dependencies)


def _query_names(dependant: Dependant) -> set[str]:
    """Every query parameter that a route or one of its dependencies declares."""
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_query_names(one) for one in dependant.dependencies))


def _check_query(request: Request, known: set[str]) -> None:
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            hint = f"; this route takes {', '.join(sorted(known))}" if known else "; this route takes none"
            raise invalid(f"There is no query parameter {name[:64]!r}{hint}.", name[:64])
        if name in seen:
            raise invalid(f"The query parameter {name!r} stands twice.", name)
        seen.add(name)


def check_content_type(request: Request, wanted: str) -> None:
    """Raises Refused `unsupported_media_type`, also for no type at all, which a browser may send from
    anywhere."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != wanted:
        raise Refused("unsupported_media_type", f"Send the body as {wanted}.", "content-type")


def response_of(refused: Refused) -> Response:
    headers = {name.decode(): value.decode() for name, value in http_api.error_headers(refused)}
    if refused.code == "unauthenticated":
        headers["www-authenticate"] = "Bearer"
    return Response(
        http_api.error_body(refused),
        status_code=http_api.status_of(refused),
        headers=headers,
        media_type="application/json",
    )


def install_error_handlers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Map every fault that a framework could answer by itself. `routers` are those of the API, which know
    the methods of a path."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return response_of(error)

    async def unprocessable(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return response_of(_of_validation(error))

    async def routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = _methods(routers, request.url.path) or (error.headers or {}).get("Allow", "")
            response = response_of(Refused("method_not_allowed", f"This route takes {allowed}."))
            response.headers["allow"] = allowed
            return response
        path = request.url.path[:PATH_SHOWN_CHARACTERS]
        return response_of(
            Refused("not_found", f"There is no route {path}; GET /api/v1/openapi.json lists what there is.")
        )

    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody is there to read it

    async def fault(_: Request, error: Exception) -> Response:
        """Ours. It is raised on behind this answer, and logged by the edge."""
        return response_of(
            Refused("internal", "The request failed inside the server; its logs have the request id.")
        )

    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(RequestValidationError, unprocessable)
    app.add_exception_handler(HTTPException, routing)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, fault)


def _methods(routers: Sequence[APIRouter], path: str) -> str:
    """Every method of a path, as an Allow header has them."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    found = [route for route in routes if route.path == path]  # an id never looks like one of these
    found = found or [route for route in routes if route.path_regex.match(path)]
    return ", ".join(sorted(method for route in found for method in route.methods or ()))


def _of_validation(error: RequestValidationError) -> Refused:
    """The first fault, named by its place in the request."""
    first = error.errors()[0]
    where, *place = first["loc"]
    if where == "body":
        place = _in_body(place, error.body, missing=first["type"] == "missing")
    param = _place(place) or str(where)
    if first["type"] == "extra_forbidden":
        return invalid(f"There is no field {param!r} here.", param)
    if first["type"] == "missing":
        return invalid(f"{param} is missing.", param)
    words = PATTERN_WORDS.get(first.get("ctx", {}).get("pattern"))
    message = words or str(first["msg"]).removeprefix("Value error, ")
    return invalid(f"{param}: {message[0].lower()}{message[1:]}.", param)


def _in_body(parts: list[Any], body: Any, *, missing: bool) -> list[Any]:
    """Those parts of a place that a caller wrote: Pydantic also names which member of a union it tried."""
    found = []
    for part in parts:
        within = range(len(body)) if isinstance(body, list) else body if isinstance(body, dict) else ()
        if part in within:
            body = body[part]
        elif not (missing and part is parts[-1]):
            continue
        found.append(part)
    return found


def _place(parts: list[Any]) -> str:
    """A path such as files[0].sha256."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{part}"
    return text
