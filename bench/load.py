"""A load generator that costs little itself: raw HTTP/1.1 over asyncio protocols."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import psutil

CLOCK = time.perf_counter


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send chat requests, and with which token."""

    host: str
    port: int
    path: str = "/v1/chat/completions"
    token: str = ""
    model: str = "bench"

    def request(self, **options: object) -> bytes:
        body = json.dumps(
            {"model": self.model, "messages": [{"role": "user", "content": "hello " * 20}], **options}
        ).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Authorization: Bearer {self.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Client(asyncio.Protocol):
    """One connection; `exchange` sends a request and waits for the end of its answer, noting times."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.gaps: list[float] = []
        self.chunks = 0
        self.tail = b""
        self.head = b""
        self.length: int | None = None
        self.seen = 0
        self.done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionError("the connection broke"))

    def data_received(self, data: bytes) -> None:
        now = CLOCK()
        if self.length is None and not self._take_head(data):
            return
        count = data.count(b"data: ")
        if count:
            if self.last_at is None:
                self.first_at = now
            else:
                self.gaps.append(now - self.last_at)
            self.last_at = now
            self.chunks += count
        if self.first_at is None:
            self.first_at = now
        self.tail = (self.tail + data)[-16:]
        self.seen += len(data)
        ended = self.tail.endswith(b"0\r\n\r\n") if self.length == -1 else self.seen >= (self.length or 0)
        if ended and self.done is not None and not self.done.done():
            self.done.set_result(None)

    def _take_head(self, data: bytes) -> bool:
        self.head += data
        head, separator, _ = self.head.partition(b"\r\n\r\n")
        if not separator:
            return False
        if not head.startswith(b"HTTP/1.1 200"):
            assert self.done is not None
            self.done.set_exception(RuntimeError(self.head[:300].decode("latin-1")))
        lower = head.lower()
        at = lower.find(b"content-length:")
        self.length = -1 if at < 0 else int(lower[at + 15 :].split(b"\r\n")[0])
        self.seen = -len(head) - 4 - (len(self.head) - len(data))
        self.head = b""
        return True

    async def exchange(self, request: bytes) -> float:
        """Seconds until the answer was complete."""
        assert self.transport is not None
        self.length, self.first_at, self.last_at, self.tail, self.seen = None, None, None, b"", 0
        self.done = asyncio.get_running_loop().create_future()
        began = CLOCK()
        self.transport.write(request)
        await self.done
        return CLOCK() - began


async def connect(target: Target) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, target.host, target.port)
    return client


@dataclass(slots=True)
class Figures:
    """What a run of requests took. Times in seconds; CPU of the processes that were watched."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    requests: int = 0
    chunks: int = 0
    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    memory_growth: int = 0

    @property
    def cpu_per_request_us(self) -> float:
        return self.cpu_seconds / max(1, self.requests) * 1e6

    @property
    def cpu_per_chunk_us(self) -> float:
        return self.cpu_seconds / max(1, self.chunks) * 1e6


def percentile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q))] if ordered else float("nan")


def median_ms(values: Sequence[float]) -> float:
    return statistics.median(values) * 1000 if values else float("nan")


def used(pids: Sequence[int]) -> tuple[float, int]:
    """CPU seconds and resident bytes of these very processes."""
    cpu, resident = 0.0, 0
    for pid in pids:
        process = psutil.Process(pid)
        times = process.cpu_times()
        cpu += times.user + times.system
        resident += process.memory_info().rss
    return cpu, resident


async def closed_loop(
    target: Target, *, clients: int, requests: int, watched: Sequence[int] = (), **options: object
) -> Figures:
    """`clients` connections that each send their next request when the last one is answered."""
    connections = [await connect(target) for _ in range(clients)]
    request = target.request(**options)
    short = target.request(**{**options, "max_tokens": 1})
    for client in connections:
        await client.exchange(short)  # warm
    figures = Figures()
    left = requests
    cpu, _ = used(watched)
    began = CLOCK()

    async def work(client: Client) -> None:
        nonlocal left
        client.chunks, client.gaps = 0, []
        while left > 0:
            left -= 1
            sent = CLOCK()
            figures.latencies.append(await client.exchange(request))
            if client.first_at is not None:
                figures.firsts.append(client.first_at - sent)
        figures.chunks += client.chunks

    await asyncio.gather(*(work(client) for client in connections))
    figures.seconds = CLOCK() - began
    figures.cpu_seconds = used(watched)[0] - cpu
    figures.requests = len(figures.latencies)
    for client in connections:
        if client.transport is not None:
            client.transport.close()
    return figures


async def many(work: Callable[[int], Awaitable[None]], count: int) -> None:
    await asyncio.gather(*(work(number) for number in range(count)))
