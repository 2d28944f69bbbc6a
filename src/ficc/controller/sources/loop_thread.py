"""An event loop in a thread of its own, for work whose amount somebody else decides.

Taking a fast source's bytes off the network and out of TLS costs milliseconds of computing for each megabyte. Done
on the controller's own loop, every other request would wait for it; from here, that loop gets no more than a
wake-up for each piece.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class LoopThread:
    """Begun by the first work, ended for good by `close`."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """The result of what is done there, for whoever waits here. Cancelling it cancels the work; after
        `close` it is cancelled from the beginning."""
        if self._loop.is_closed():
            work.close()
            never: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            never.cancel()
            return never
        if not self._thread.is_alive():
            self._thread.start()
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def close(self) -> None:
        """Cancel what is still done there, and wait for its end."""
        if self._thread.is_alive():
            await self.run(_cancel_the_rest())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
        self._loop.close()


async def _cancel_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
