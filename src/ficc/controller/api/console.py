"""The console's files, with the policy that keeps anything else from running in its pages."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

DIRECTORY = Path(__file__).parents[2] / "console"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["content-security-policy"] = POLICY
        response.headers["x-content-type-options"] = "nosniff"
        response.headers["referrer-policy"] = "no-referrer"
        response.headers["cache-control"] = "no-cache"
        return response


class _Console(Mount):
    """Everything but the API, whose routes have to be found, and found missing, without this one."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and (scope["path"] + "/").startswith("/api/"):
            return Match.NONE, {}
        return super().matches(scope)


def files() -> Mount:
    return _Console("/", _Files(directory=DIRECTORY, html=True))
