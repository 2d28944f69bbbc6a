"""How a command finds its controller and its token.

In this order: the environment (`FICC_URL`, `FICC_TOKEN_FILE`, `FICC_TOKEN`), then the controller of this
machine's state directory with its owner's token. Secrets never come by flags.
"""

from __future__ import annotations

import asyncio
import json
import os
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ficc.cli.failure import WRONG_USAGE, Failure, usage
from ficc.client.errors import ApiError, Unreachable
from ficc.domain import ids

if TYPE_CHECKING:
    from ficc.client.api import Api
    from ficc.settings import Settings

T = TypeVar("T")

KINDS = {"/inference": "services", "/contributors": "nodes"}
"""What people call the objects of a route, where the route says it otherwise."""


def settings() -> Settings:
    """The settings in force. Raises Failure for a file that is no TOML, pydantic's ValidationError for what is in
    it."""
    from ficc.settings import (
        CONFIGURATION_FILE,
        load,
    )  # here, because loading takes most of a small command's time

    try:
        return load()
    except tomllib.TOMLDecodeError as error:
        where = f"{CONFIGURATION_FILE} in the state directory"
        raise Failure("invalid_settings", f"{where}: {error}.", status=WRONG_USAGE) from None


def find() -> Api:
    """The controller to talk to. Raises Unreachable saying what to do."""
    from ficc.client.api import Api  # here, for the same reason

    url, token = os.environ.get("FICC_URL"), os.environ.get("FICC_TOKEN")
    token_file = os.environ.get("FICC_TOKEN_FILE")
    if token_file:
        token = _token_of(Path(token_file))
    if url:
        return Api(_checked(url), token)
    here = settings()
    try:
        address = json.loads(here.address_file.read_text())
        own = here.owner_token_file.read_text().strip()
    except FileNotFoundError:
        raise Unreachable(
            f"No controller runs on {here.state_directory}. Start one with `ficc up`, or set FICC_URL and "
            "FICC_TOKEN_FILE for one elsewhere."
        ) from None
    except PermissionError:
        raise Unreachable(
            f"{here.controller_directory} belongs to another account. Use that account, or set FICC_URL and "
            "FICC_TOKEN_FILE."
        ) from None
    return Api(str(address["origin"]), token or own)


def _token_of(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise usage(f"FICC_TOKEN_FILE={file} cannot be read: {why}.") from None


def _checked(url: str) -> str:
    """The origin that FICC_URL names. Raises Failure."""
    if url.startswith("unix:/"):
        return url
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an address in brackets
        usable = False
    if not usable or parts.path.strip("/") or parts.query or parts.fragment:
        raise usage(f"FICC_URL={url} is no http(s)://HOST:PORT and no unix:/path.")
    return url.rstrip("/")


def with_api(work: Callable[[Api], Awaitable[T]]) -> T:
    """Run a command's work against its controller."""

    async def run() -> T:
        async with find() as api:
            return await work(api)

    return asyncio.run(run())


async def resolve(api: Api, path: str, given: str, *names: str) -> dict[str, Any]:
    """The one object of a list whose id, one of whose names, or whose id's prefix was given.

    A whole id is asked for directly. Raises LookupError for none or several.
    """
    if ids.is_id(given) and (found := await _by_id(api, path, given)) is not None:
        return found
    prefixed: list[dict[str, Any]] = []
    async for item in api.every(path):
        if item["id"] == given or any(_name(item, name) == given for name in names):
            return item
        if len(given) >= 4 and str(item["id"]).startswith(given):
            prefixed.append(item)
    if len(prefixed) == 1:
        return prefixed[0]
    kind = KINDS.get(path, path.strip("/"))
    if prefixed:
        raise LookupError(f"{given!r} is the beginning of {len(prefixed)} ids of {kind}; give more of it.")
    raise LookupError(f"There is none called {given!r} among the {kind}.")


async def _by_id(api: Api, path: str, given: str) -> dict[str, Any] | None:
    """None when there is none, or when such objects are only listed."""
    try:
        found: dict[str, Any] = await api.call("GET", f"{path}/{given}")
    except ApiError as error:
        if error.code in ("not_found", "method_not_allowed"):
            return None
        raise
    return found


def _name(item: dict[str, Any], path: str) -> Any:
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
