"""Something of the benchmark's on the event loop of a process of ficc."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

Work = Coroutine[Any, Any, Any]


def run_module(module: str, watch: Callable[[], Work]) -> None:
    """Run a module of ficc as `python -m` does, with this beside it on its loop until it ends."""
    run = uvloop.run

    async def beside(work: Work) -> Any:
        watching = asyncio.create_task(watch())
        try:
            return await work
        finally:
            watching.cancel()

    uvloop.run = lambda work, **options: run(beside(work), **options)  # type: ignore[assignment]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
