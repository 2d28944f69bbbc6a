"""Work on a loop of its own: beside this one, cancelled with whoever waits, and ended by `close`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ficc.controller.sources.loop_thread import LoopThread

PATIENCE_SECONDS = 30.0
NAME = "a loop of its own"


@asynccontextmanager
async def begun() -> AsyncIterator[LoopThread]:
    made = LoopThread(NAME)
    try:
        yield made
    finally:
        await made.close()


class Lasting:
    """Work that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()

    async def work(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def seen(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, PATIENCE_SECONDS)


async def test_a18_work_that_holds_its_thread_does_not_hold_this_loop() -> None:
    here = threading.Event()

    async def work() -> bool:
        return here.wait(PATIENCE_SECONDS)

    async with begun() as thread:
        result = thread.run(work())
        await asyncio.sleep(0.01)
        here.set()
        assert await result, "this loop went on meanwhile"


async def test_what_it_raises_is_raised_here() -> None:
    async def work() -> None:
        raise LookupError("there")

    async with begun() as thread:
        with pytest.raises(LookupError, match="there"):
            await thread.run(work())


async def test_who_is_cancelled_cancels_the_work() -> None:
    lasting = Lasting()
    async with begun() as thread:
        waiting = asyncio.create_task(asyncio.wait_for(thread.run(lasting.work()), None))
        assert await seen(lasting.began)
        waiting.cancel()
        assert await seen(lasting.ended)


async def test_close_ends_the_work_and_the_thread_for_good() -> None:
    lasting, thread = Lasting(), LoopThread(NAME)
    result = thread.run(lasting.work())
    assert await seen(lasting.began)
    assert NAME in {one.name for one in threading.enumerate()}
    await thread.close()
    assert lasting.ended.is_set()
    assert NAME not in {one.name for one in threading.enumerate()}
    with pytest.raises(asyncio.CancelledError):
        await result
    with pytest.raises(asyncio.CancelledError):
        await thread.run(lasting.work())


async def test_without_any_work_there_is_no_thread() -> None:
    async with begun():
        assert NAME not in {one.name for one in threading.enumerate()}
