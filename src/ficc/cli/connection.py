"""How a command finds its controller and its token.

In this order: the environment (`FICC_URL`, `FICC_TOKEN_FILE`, `FICC_TOKEN`), then the controller of this
machine's state directory with its owner's token. Secrets never come by flags.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ficc.client.errors import Unreachable

if TYPE_CHECKING:
    from ficc.client.api import Api
    from ficc.settings import Settings

T = TypeVar("T")


def settings() -> Settings:
    from ficc.settings import load  # here, because loading it is most of a small command's time

    return load()


def find() -> Api:
    """The controller to talk to. Raises Unreachable saying what to do."""
    from ficc.client.api import Api  # here, for the same reason

    url, token = os.environ.get("FICC_URL"), os.environ.get("FICC_TOKEN")
    token_file = os.environ.get("FICC_TOKEN_FILE")
    if token_file:
        token = Path(token_file).read_text().strip()
    if url:
        return Api(url.rstrip("/"), token)
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


def with_api(work: Callable[[Api], Awaitable[T]]) -> T:
    """Run a command's work against its controller."""

    async def run() -> T:
        async with find() as api:
            return await work(api)

    return asyncio.run(run())


async def resolve(api: Api, path: str, given: str, *names: str) -> dict[str, Any]:
    """The one object of a list whose id, one of whose names, or whose id's prefix was given.

    Raises LookupError for none or several.
    """
    prefixed: list[dict[str, Any]] = []
    async for item in api.every(path):
        if item["id"] == given or any(_name(item, name) == given for name in names):
            return item
        if len(given) >= 4 and str(item["id"]).startswith(given):
            prefixed.append(item)
    if len(prefixed) == 1:
        return prefixed[0]
    kind = path.strip("/").split("/")[0]
    if prefixed:
        raise LookupError(f"{given!r} is the beginning of {len(prefixed)} ids of {kind}; give more of it.")
    raise LookupError(f"There is none called {given!r} among {kind}.")


def _name(item: dict[str, Any], path: str) -> Any:
    value: Any = item
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
