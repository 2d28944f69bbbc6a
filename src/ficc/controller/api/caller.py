"""Who calls: a bearer token, or a browser's session with its token against forgery and its origin checked."""

from __future__ import annotations

import hmac
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request

from ficc.controller.operations.access import csrf_token
from ficc.controller.operations.authority import Authority
from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.settings import Settings, parse_listen

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class Callers:
    """Finds the actor of a request. Raises Refused."""

    def __init__(self, settings: Settings, authority: Authority) -> None:
        self._authority = authority
        public = settings.server.public_origin
        self._public = None if public is None else str(public).rstrip("/")
        self.secure = settings.server.tls_cert is not None or (self._public or "").startswith("https:")
        self.cookie = "__Host-ficc_session" if self.secure else "ficc_session"
        listen = parse_listen(settings.server.listen)
        self._listen_host = listen[0] if isinstance(listen, tuple) else None

    def actor(self, request: Request) -> Actor:
        authorization = request.headers.get("authorization")
        if authorization is not None:
            kind, _, secret = authorization.partition(" ")
            if kind.lower() != "bearer" or not secret.strip():
                raise Refused("unauthenticated", "Send the token as `Authorization: Bearer ficc_…`.")
            return _not_bound_to_a_service(self._authority.authenticate(secret.strip()))
        return self.browser(request)

    def browser(self, request: Request) -> Actor:
        """The caller of a session cookie; also of the inference routes, so that the console needs no token."""
        secret = request.cookies.get(self.cookie, "")
        if not secret:
            raise Refused("unauthenticated", "Sign in, or send a token as `Authorization: Bearer ficc_…`.")
        self.check_browser(request)
        actor = self._authority.authenticate_session(secret)
        if request.method not in SAFE_METHODS and not _has_csrf_token(request, secret):
            raise Refused(
                "csrf_failed", "The X-CSRF-Token is missing or of another session; reload the page."
            )
        _check_window(request, actor)
        return actor

    def session_secret(self, request: Request) -> str | None:
        return request.cookies.get(self.cookie)

    def check_browser(self, request: Request) -> None:
        """A browser must have come by a name that is ours, and from a page of ours."""
        if not self._own_host(request.headers.get("host", "")):
            raise Refused("csrf_failed", "The console is not served under this name; use the printed link.")
        origin = request.headers.get("origin")
        if request.method not in SAFE_METHODS and origin != self.origin(request):
            raise Refused("csrf_failed", "The request comes from a page of another origin.")

    def _own_host(self, host: str) -> bool:
        """So that a name which an attacker points here is not ours (DNS rebinding)."""
        if self._public is not None and host == urlsplit(self._public).netloc:
            return True
        name = urlsplit(f"//{host}").hostname
        return name in LOOPBACK_NAMES or (name is not None and name == self._listen_host)

    def origin(self, request: Request) -> str:
        """How this caller reaches us."""
        if self._public is not None and urlsplit(self._public).netloc == request.headers.get("host"):
            return self._public
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{request.headers.get('host', '')}"


def _not_bound_to_a_service(actor: Actor) -> Actor:
    if actor.kind == "service_token":
        raise Refused("denied", "A service token only invokes its service; use another credential here.")
    return actor


def _has_csrf_token(request: Request, secret: str) -> bool:
    given = request.headers.get("x-csrf-token", "")
    return hmac.compare_digest(given.encode(), csrf_token(secret).encode())


def _check_window(request: Request, actor: Actor) -> None:
    """A window says what it shows; one that is out of date must not act."""
    project = request.headers.get("x-ficc-project")
    if project is not None and project != actor.project_id:
        raise Refused("project_changed", "This window shows another project than the session; reload it.")
    session = request.headers.get("x-ficc-session")
    if session is not None and session != actor.authority_id:
        raise Refused("session_changed", "This window belongs to an earlier session; reload it.")


def authenticate(request: Request) -> None:
    """Find the caller and keep it with the request; done before anything of the body is read."""
    callers: Callers = request.app.state.callers
    request.scope["ficc.actor"] = callers.actor(request)


def the_caller(request: Request) -> Actor:
    actor: Actor = request.scope["ficc.actor"]
    return actor


Caller = Annotated[Actor, Depends(the_caller)]
"""The authenticated caller of a route."""
