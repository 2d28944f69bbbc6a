"""The gateway rows of the performance budget: through gateway, link, executor and sandbox, and directly."""

from __future__ import annotations

import asyncio
import os
import random
import time

from bench.load import Client, Figures, Target, closed_loop, connect, median_ms, percentile, used
from bench.setup import Bench

JSON_REQUESTS = 3000
STREAMS = 128
STREAM_CHUNKS = 4000
OPEN_STREAMS = 1000
OPEN_RATE = 20
OPEN_SECONDS = 10
SLOW_CLIENTS = 50
SLOW_SECONDS = 5
CANCELS = 120


def table(title: str, columns: list[str], rows: list[list[object]]) -> None:
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


async def json_answers(bench: Bench) -> None:
    """Latency at one client, throughput and cost at 32."""
    rows: list[list[object]] = []
    single = {}
    for name, target, watched in _both(bench):
        one = await closed_loop(target, clients=1, requests=400, max_tokens=16)
        many = await closed_loop(target, clients=32, requests=JSON_REQUESTS, watched=watched, max_tokens=16)
        single[name] = median_ms(one.latencies)
        rows.append(
            [
                name,
                f"{single[name]:.2f} ms",
                f"{many.requests / many.seconds:.0f}/s",
                f"{percentile(many.latencies, 0.99) * 1000:.1f} ms",
                f"{many.cpu_per_request_us:.0f} µs" if watched else "–",
            ]
        )
    rows.append(["added", f"{single['through ficc'] - single['direct']:.2f} ms", "", "", ""])
    columns = ["JSON chat", "p50, 1 client", "32 clients", "p99, 32 clients", "our CPU per request"]
    table("JSON answers", columns, rows)


async def streams(bench: Bench) -> None:
    """Cost per chunk at saturation, time to first byte at one client."""
    rows: list[list[object]] = []
    single = {}
    for name, target, watched in _both(bench):
        one = await closed_loop(target, clients=1, requests=200, max_tokens=4, stream=True)
        full = await closed_loop(
            target, clients=32, requests=STREAMS, watched=watched, max_tokens=STREAM_CHUNKS, stream=True
        )
        single[name] = median_ms(one.firsts)
        rows.append(
            [
                name,
                f"{single[name]:.2f} ms",
                f"{full.chunks / full.seconds:,.0f}/s",
                f"{full.cpu_per_chunk_us:.1f} µs" if watched else "–",
            ]
        )
    rows.append(["added", f"{single['through ficc'] - single['direct']:.2f} ms", "", ""])
    columns = ["SSE chat", "first byte p50, 1 client", "chunks, 32 streams", "our CPU per chunk"]
    table("Streams at saturation", columns, rows)


async def open_streams(bench: Bench) -> None:
    """A thousand streams at the pace of reading."""
    rows: list[list[object]] = []
    for name, target, watched in _both(bench, "many"):
        figures = await _paced(target, watched or [os.getpid()])
        rows.append(
            [
                name,
                f"{percentile(figures.gaps, 0.5) * 1000:.0f} ms",
                f"{percentile(figures.gaps, 0.99) * 1000:.0f} ms",
                f"{figures.memory_growth / OPEN_STREAMS / 1e6:.3f} MB" if watched else "–",
                f"{figures.cpu_per_chunk_us:.0f} µs" if watched else "–",
            ]
        )
    columns = [
        f"{OPEN_STREAMS} streams at {OPEN_RATE}/s",
        "gap p50",
        "gap p99",
        "ours per stream",
        "our CPU per chunk",
    ]
    table("Open streams", columns, rows)


async def _paced(target: Target, watched: list[int]) -> Figures:
    figures = Figures()
    count = OPEN_RATE * OPEN_SECONDS
    request = target.request(max_tokens=count, stream=True, rate=OPEN_RATE)
    cpu, resident = used(watched)
    clients: list[Client] = []
    waiting = []
    for number in range(OPEN_STREAMS):
        client = await connect(target)
        clients.append(client)
        waiting.append(asyncio.create_task(client.exchange(request)))
        if number % 50 == 49:
            await asyncio.sleep(0.05)
    await asyncio.sleep(OPEN_SECONDS / 2)
    figures.memory_growth = used(watched)[1] - resident
    await asyncio.gather(*waiting)
    figures.cpu_seconds = used(watched)[0] - cpu
    for client in clients:
        figures.gaps += client.gaps
        figures.chunks += client.chunks
        if client.transport is not None:
            client.transport.close()
    return figures


async def slow_readers(bench: Bench) -> None:
    """Clients that never read a long stream, and what their neighbours notice."""
    before = await closed_loop(bench.relayed(), clients=1, requests=200, max_tokens=16)
    request = bench.relayed().request(max_tokens=2_000_000, stream=True)
    _, resident = used(bench.ours)
    clients = []
    for _ in range(SLOW_CLIENTS):
        client = await connect(bench.relayed())
        assert client.transport is not None
        client.transport.pause_reading()
        client.transport.write(request)
        clients.append(client)
    await asyncio.sleep(SLOW_SECONDS)
    growth = used(bench.ours)[1] - resident
    beside = await closed_loop(bench.relayed(), clients=1, requests=200, max_tokens=16)
    for client in clients:
        assert client.transport is not None
        client.transport.abort()
    rows: list[list[object]] = [
        [
            f"{growth / SLOW_CLIENTS / 1e6:.2f} MB",
            f"{median_ms(before.latencies):.2f} ms",
            f"{median_ms(beside.latencies):.2f} ms",
        ]
    ]
    columns = [f"growth per client of {SLOW_CLIENTS}", "neighbour p50 before", "neighbour p50 beside them"]
    table("Clients that never read", columns, rows)


async def cancellations(bench: Bench) -> None:
    """From the client's close to the engine's connection being closed; before the first byte and in the
    stream. The engine writes the time of each, on the same clock."""
    chance = random.Random(1)
    rows: list[list[object]] = []
    for phase, options in (
        ("before the first byte", {"first_after": 30}),
        ("in the stream", {"rate": 50}),
    ):
        closed: dict[str, int] = {}
        for number in range(CANCELS):
            name = f"{phase.replace(' ', '-')}-{number}"
            client = await connect(bench.relayed())
            assert client.transport is not None
            client.done = asyncio.get_running_loop().create_future()
            client.transport.write(
                bench.relayed().request(max_tokens=2000, stream=True, user=name, **options)
            )
            await asyncio.sleep(0.03 + chance.random() * 0.05)
            closed[name] = time.monotonic_ns()
            client.transport.abort()
            client.done.cancel()
        await asyncio.sleep(1)
        ends = {}
        for line in (await bench.engine_log()).splitlines():
            words = line.split()
            if len(words) == 3 and words[0] == "aborted":
                ends[words[1]] = int(words[2])
        took = [(ends[name] - at) / 1e9 for name, at in closed.items() if name in ends]
        rows.append(
            [
                phase,
                f"{len(took)} of {CANCELS}",
                f"{median_ms(took):.1f} ms",
                f"{percentile(took, 0.99) * 1000:.1f} ms",
            ]
        )
    table("Disconnect to engine connection closed", ["client leaves", "seen", "p50", "p99"], rows)


def _both(bench: Bench, service: str = "few") -> list[tuple[str, Target, list[int]]]:
    return [("direct", bench.direct, []), ("through ficc", bench.relayed(service), bench.ours)]
