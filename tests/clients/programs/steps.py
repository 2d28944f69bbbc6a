"""What the Python programs have in common: where they are told to go, and one JSON line about each step."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

_told = json.loads(os.environ["CLIENT_TEST"])
BASE_URL: str = _told["base_url"]
TOKEN: str = _told["token"]
MODEL: str = _told["model"]
WRONG_TOKEN: str = _told["wrong_token"]
UNKNOWN_MODEL: str = _told["unknown_model"]
HI: str = _told["hi"]
HANG: str = _told["hang"]
"""A message upon which the engine says one piece and then nothing until it is left."""
TIMEOUT_SECONDS = 30.0


def run(*steps: Callable[[], dict[str, Any] | None]) -> None:
    """Every step, whatever became of those before; an exception is what a step found too."""
    for step in steps:
        try:
            found = step()
        except Exception as error:
            found = {
                "raised": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__],
                "message": str(error),
                "trace": traceback.format_exc(),
            }
        if found is not None:
            _say(step.__name__, found)


def aborted(text: str) -> None:
    """A stream that had begun with this text was left. Nothing else may end it: wait until that was seen."""
    _say("abort", {"text": text})
    sys.stdin.readline()


async def aborted_in_loop(text: str) -> None:
    """The same, while an event loop runs on."""
    _say("abort", {"text": text})
    await asyncio.to_thread(sys.stdin.readline)


async def cancelled(pieces: AsyncIterator[str]) -> str:
    """The first piece of a stream, whose reader was cancelled while it waited for the second."""
    first = asyncio.get_running_loop().create_future()

    async def read() -> None:
        async for piece in pieces:
            first.set_result(piece)

    reader = asyncio.create_task(read())
    await asyncio.wait([first, reader], return_when=asyncio.FIRST_COMPLETED)
    if not first.done():
        await reader  # which says why
    reader.cancel()
    await asyncio.wait([reader])
    return str(first.result())


def _say(step: str, found: dict[str, Any]) -> None:
    print(json.dumps({"step": step, **found}), flush=True)
