"""Writes of one turn of the event loop, in one system call: on a connection that many requests share, a write
of its own for each frame would wake the peer as often."""

from __future__ import annotations

import asyncio


class GatheringWriter:
    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._gathered: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Written before the loop waits again, in the order of the calls."""
        if not self._gathered:
            self._loop.call_soon(self.flush)
        self._gathered.append(data)

    def flush(self) -> None:
        """Write what was gathered now."""
        gathered, self._gathered = self._gathered, []
        if gathered and not self._transport.is_closing():
            self._transport.writelines(gathered)
