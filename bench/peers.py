"""What ficc's gateway costs beside others, in one run: one worker each, the same engine, round by round in turn.

nginx passes bytes on and looks at nothing, so it is the floor; LiteLLM's proxy is what many people put there. What
counts as ficc's cost is all of controller and executor.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench import gateways
from bench.load import Figures, Target, closed_loop, connect, median_ms, percentile, used
from bench.relay import SLOW_CLIENTS, SLOW_SECONDS, STREAM_CHUNKS, table
from bench.setup import Bench

ROUNDS = 5
"""Of which each measures every gateway, so that what else the machine does meets them all."""
CLIENTS = 32
JSON_REQUESTS = 3000
"""In one round."""
FIRST_BYTES = 60
SLOW_CHUNKS = 2_000_000
HEAVY = 10
"""How much less of a round a gateway gets that takes many times as long."""

Start = Callable[[Target, Path], AbstractAsyncContextManager[tuple[Target, list[int]]]]


@dataclass(slots=True)
class Peer:
    """A gateway and what was measured of it. `share`: the part of a round's requests that it gets."""

    name: str
    target: Target
    processes: list[int]
    share: int = 1
    answers: list[Figures] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    streams: list[Figures] = field(default_factory=list)
    growth: int | None = None


async def peers(bench: Bench) -> None:
    """JSON, streams and clients that never read, through each gateway in turn."""
    absent: list[str] = []
    async with AsyncExitStack() as stack:
        measured = [Peer("direct", bench.direct, [])]
        for name, start, share in (
            ("nginx, plain proxy", gateways.nginx, 1),
            (f"LiteLLM {gateways.litellm_version()} proxy", gateways.litellm, HEAVY),
        ):
            peer = await _started(stack, bench, name, start, share, absent)
            if peer is not None:
                measured.append(peer)
        measured.insert(len(measured) - (measured[-1].share > 1), Peer("ficc", bench.relayed(), bench.ours))
        for number in range(ROUNDS):
            print(f"round {number + 1} of {ROUNDS} …", file=sys.stderr)
            for peer in measured:
                await _round(peer)
        for peer in measured:
            if peer.processes:
                peer.growth = await _growth(peer)
    _print(measured, absent)


async def _started(
    stack: AsyncExitStack, bench: Bench, name: str, start: Start, share: int, absent: list[str]
) -> Peer | None:
    directory = bench.directory / start.__name__
    try:
        target, processes = await stack.enter_async_context(start(bench.direct, directory))
    except gateways.Absent as why:
        absent.append(f"{name}: {why}")
        return None
    return Peer(name, target, processes, share)


async def _round(peer: Peer) -> None:
    watched = peer.processes
    peer.answers.append(
        await closed_loop(
            peer.target,
            clients=CLIENTS,
            requests=JSON_REQUESTS // peer.share,
            watched=watched,
            max_tokens=16,
        )
    )
    first = await closed_loop(
        peer.target, clients=1, requests=FIRST_BYTES // peer.share, max_tokens=4, stream=True
    )
    peer.firsts += first.firsts
    peer.streams.append(
        await closed_loop(
            peer.target,
            clients=CLIENTS,
            requests=CLIENTS,
            watched=watched,
            max_tokens=STREAM_CHUNKS // peer.share,
            stream=True,
        )
    )


async def _growth(peer: Peer) -> int:
    """Bytes of memory for clients that ask for a long stream and read nothing."""
    request = peer.target.request(max_tokens=SLOW_CHUNKS, stream=True)
    _, resident = used(peer.processes)
    clients = []
    for _ in range(SLOW_CLIENTS):
        client = await connect(peer.target)
        assert client.transport is not None
        client.transport.pause_reading()
        client.transport.write(request)
        clients.append(client)
    await asyncio.sleep(SLOW_SECONDS)
    growth = used(peer.processes)[1] - resident
    for client in clients:
        assert client.transport is not None
        client.transport.abort()
    return growth


def _print(measured: list[Peer], absent: list[str]) -> None:
    """All rounds together; in brackets the ratio to the direct connection, or of CPU to nginx."""
    direct = measured[0]
    floor = next((peer for peer in measured if peer.name.startswith("nginx")), None)
    rows: list[list[object]] = []
    for peer in measured:
        latencies = _latencies(peer)
        rows.append(
            [
                peer.name,
                _with_ratio(_per_second(peer), _per_second(direct), "{:,.0f}", peer is direct),
                f"{median_ms(latencies):.1f} ms, {percentile(latencies, 0.99) * 1000:.1f} ms",
                _cost(peer, floor, _per_request),
                f"{median_ms(peer.firsts):.2f} ms",
                _cost(peer, floor, _per_chunk),
                "–" if peer.growth is None else f"{peer.growth / 1e6:.1f} MB",
            ]
        )
    rows += [[name, *["–"] * 6] for name in absent]
    columns = [
        f"one worker each, {ROUNDS} rounds in turn",
        f"JSON/s, {CLIENTS} clients (of direct)",
        "p50, p99",
        "CPU per JSON request (of nginx's)",
        "first byte p50, 1 client",
        f"CPU per chunk, {CLIENTS} streams (of nginx's)",
        f"growth, {SLOW_CLIENTS} clients that never read",
    ]
    table("Beside other gateways", columns, rows)


def _per_second(peer: Peer) -> float:
    return len(_latencies(peer)) / sum(figures.seconds for figures in peer.answers)


def _per_request(peer: Peer) -> float:
    return sum(figures.cpu_seconds for figures in peer.answers) / len(_latencies(peer)) * 1e6


def _per_chunk(peer: Peer) -> float:
    chunks = sum(figures.chunks for figures in peer.streams)
    return sum(figures.cpu_seconds for figures in peer.streams) / chunks * 1e6


def _latencies(peer: Peer) -> list[float]:
    return [one for figures in peer.answers for one in figures.latencies]


def _cost(peer: Peer, floor: Peer | None, measure: Callable[[Peer], float]) -> str:
    if not peer.processes:
        return "–"
    spent = measure(peer)
    shape = "{:,.0f} µs" if spent >= 100 else "{:.1f} µs"
    if floor is None or peer is floor:
        return shape.format(spent)
    return _with_ratio(spent, measure(floor), shape, itself=False)


def _with_ratio(value: float, base: float, shape: str, itself: bool) -> str:
    if itself or not base:
        return shape.format(value)
    ratio = value / base
    return f"{shape.format(value)} ({ratio:{'.2g' if ratio < 10 else ',.0f'}}×)"
