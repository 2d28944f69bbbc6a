"""What the providers ask of processes and descriptors, without a sandbox."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from ficc.executor.providers.processes import connect_reading

PIPES = 8000
"""Closed twice, the descriptors of a tenth of these have always hit another thread's."""
OPENERS = 3


def test_a_pipe_is_closed_once() -> None:
    """Its number may be another thread's descriptor by the time of a second close."""

    async def read_to_the_end() -> None:
        for _ in range(PIPES):
            read, write = os.pipe()
            transport = await connect_reading(asyncio.Protocol, read)
            transport.close()
            os.close(write)
            await asyncio.sleep(0)
            assert not lost, "a descriptor was closed under another thread"

    before = len(os.listdir("/proc/self/fd"))
    with opening_files() as lost:
        uvloop.run(read_to_the_end())
    assert len(os.listdir("/proc/self/fd")) < before + PIPES // 100, "every one is closed"


@contextmanager
def opening_files() -> Iterator[list[OSError]]:
    """Threads that open and close files all the time; what went wrong with that."""
    lost: list[OSError] = []
    done = threading.Event()

    def keep_opening() -> None:
        while not done.is_set():
            try:
                os.close(os.open("/proc/self/stat", os.O_RDONLY))
            except OSError as error:
                lost.append(error)

    threads = [threading.Thread(target=keep_opening) for _ in range(OPENERS)]
    for thread in threads:
        thread.start()
    try:
        yield lost
    finally:
        done.set()
        for thread in threads:
            thread.join()
