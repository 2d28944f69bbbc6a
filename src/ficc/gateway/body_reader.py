"""Reading inference bodies: small ones here, large ones in a process of our own, so that no other request waits.

The process is asked over its standard input and answers over its standard output, one body at a time. It is started
for the first large body, and again when it has died; it ends by itself once its input does, so it outlives nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from ficc.domain.errors import Refused
from ficc.gateway import body_process
from ficc.gateway.body_process import ANSWER, QUESTION
from ficc.protocol import openai

log = logging.getLogger("ficc.gateway")

HERE_BYTES_MAX = 256 << 10
"""A body above this is read in the other process."""
ANSWER_SECONDS_MAX = 60.0
"""For one body; the largest takes about a second. A process that is slower is given up as one that died."""
TRIES = 2
"""How often a body is read whose process dies on it."""


class BodyReader:
    def __init__(self, *, depth_max: int, values_max: int) -> None:
        self._depth_max = depth_max
        self._values_max = values_max
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    async def read(self, body: bytes) -> openai.Request:
        """The body, checked. Raises Refused."""
        if len(body) <= HERE_BYTES_MAX:
            return openai.read(body, depth_max=self._depth_max, values_max=self._values_max)
        async with self._turn:
            for _ in range(TRIES):
                try:
                    async with asyncio.timeout(ANSWER_SECONDS_MAX):
                        answer = await self._ask(body)
                    return body_process.request_of(json.loads(answer))
                except (OSError, EOFError) as error:  # a TimeoutError is an OSError
                    log.warning("the process that reads large bodies is lost: %r", error)
                    await self._end()
                except asyncio.CancelledError:
                    await self._end()  # its answer would be taken for the next body's
                    raise
        raise Refused("internal", "The process that reads large bodies died of this one; is memory short?")

    async def _ask(self, body: bytes) -> bytes:
        process = self._process = self._process or await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", body_process.__name__, stdin=PIPE, stdout=PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdin.is_closing():
            raise BrokenPipeError("it has died since")
        process.stdin.writelines((QUESTION.pack(len(body), self._depth_max, self._values_max), body))
        await process.stdin.drain()
        (length,) = ANSWER.unpack(await process.stdout.readexactly(ANSWER.size))
        return await process.stdout.readexactly(length)

    async def close(self) -> None:
        """End the process; the reader may be used again."""
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
