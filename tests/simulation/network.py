"""The connections between controllers and executors, and between executors and engines.

A connection is a stream in each direction, with delays. While the two machines are parted what is sent waits, and
arrives when they meet again, or never. On a disturbed connection control frames overtake each other and come twice.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ficc.protocol.executor_wire import HEADER, Kind
from simulation.loop import Loop, Process, current

if TYPE_CHECKING:
    from simulation.engines import Engine
    from simulation.machine import Machine

LATENCY_SECONDS = (0.0002, 0.003)
REORDERED = frozenset({Kind.CALL, Kind.RESULT, Kind.FAILURE, Kind.EVENT})
DISTURBANCE_SECONDS = 2.0
DISTURBED_SHARE = 0.3
TWICE_SHARE = 0.1


class _Peer:
    """What an executor asks of a unix socket: whose it is."""

    def getsockopt(self, *_: int) -> bytes:
        return struct.pack("3i", 1, 0, 0)


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, process: Process, link: Link) -> None:
        super().__init__()
        self.network = network
        self.process = process
        self.link = link
        self.protocol: Any = None
        self.other: End
        self.closed = False
        self.told = False
        self.last = 0.0
        self.buffered: list[bytes] | None = None

    def __hash__(self) -> int:
        return id(self)

    # What a protocol does with it.

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Peer() if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        if self.buffered is None:
            self.buffered = []

    def resume_reading(self) -> None:
        kept, self.buffered = self.buffered or [], None
        for data in kept:
            self.network.loop.call_soon(self.arrive, data)

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, frames: Any) -> None:
        if not self.closed:
            for frame in frames:
                self.network.send(self, bytes(frame))

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self.network.loop.call_soon(self.tell_lost)
            self.network.send_end(self)

    close = abort

    # What the network does with it.

    def arrive(self, data: bytes) -> None:
        if self.closed:
            return
        if self.buffered is not None:
            self.buffered.append(data)
        else:
            self.protocol.data_received(data)

    def arrive_end(self) -> None:
        if not self.closed:
            self.closed = True
            self.tell_lost()

    def tell_lost(self) -> None:
        if not self.told:
            self.told = True
            self.protocol.connection_lost(None)


class Link:
    """The way between a controller's process and a machine. `parted`: nothing arrives for now."""

    def __init__(self) -> None:
        self.parted = False
        self.disturbed = False
        self.slow_seconds = 0.0
        self.ends: list[End] = []
        self.held: list[tuple[End, bytes | None]] = []
        self.waiting: list[asyncio.Future[None]] = []


class Network:
    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.chance = loop.chance
        self.machines: dict[str, Machine] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.engines: dict[int, Engine] = {}
        """By the descriptor that an executor connected."""
        self.on_frame: Callable[[End, bytes], None] = lambda end, frame: None
        """Told of every frame that is sent, before anything happens to it."""
        loop.network = self

    def link(self, controller: str, machine: str) -> Link:
        return self.links.setdefault((controller, machine), Link())

    def latency(self) -> float:
        return self.chance.uniform(*LATENCY_SECONDS)

    # Connecting.

    async def connect(self, process: Process, path: str, factory: Callable[[], Any]) -> tuple[End, Any]:
        machine = self.machines[path]
        link = self.link(process.name, machine.name)
        await asyncio.sleep(self.latency() + link.slow_seconds)
        while link.parted:
            met = self.loop.create_future()
            link.waiting.append(met)
            await met
        listener = machine.listener
        if listener is None or machine.executor is None or machine.executor.dead:
            raise ConnectionRefusedError("nobody listens")
        near, far = End(self, process, link), End(self, machine.executor, link)
        near.other, far.other = far, near
        link.ends += [near, far]
        near.protocol = protocol = factory()
        protocol.connection_made(near)
        seconds = self.latency()
        machine.executor.later(seconds, self._accept, far, listener)
        near.last = self.loop.now + seconds + 1e-6  # nothing arrives before it was accepted
        return near, protocol

    def _accept(self, far: End, listener: Callable[[], Any]) -> None:
        far.protocol = listener()
        if far.closed:
            far.told = True
        far.protocol.connection_made(far)

    def connect_engine(self, sock: Any, factory: Callable[[], Any]) -> tuple[Any, Any]:
        engine = self.engines.pop(sock.fileno())
        sock.close()
        return engine.accept(current(), factory())

    # Sending.

    def send(self, end: End, frame: bytes) -> None:
        self.on_frame(end, frame)
        link = end.link
        if (
            link.disturbed
            and frame[4] in REORDERED
            and len(frame) == HEADER.size + HEADER.unpack_from(frame)[0]
        ):
            times = 2 if self.chance.random() < TWICE_SHARE else 1
            for _ in range(times):
                late = self.chance.random() < DISTURBED_SHARE
                delay = self.latency() + (self.chance.uniform(0, DISTURBANCE_SECONDS) if late else 0.0)
                end.other.process.later(delay, self._deliver, end, frame)
            return
        self._in_order(end, self._deliver, end, frame)

    def send_end(self, end: End) -> None:
        self._in_order(end, self._deliver, end, None)

    def _in_order(self, end: End, call: Callable[..., None], *args: object) -> None:
        end.last = max(end.last, self.loop.now + self.latency() + end.link.slow_seconds)
        end.other.process.later(end.last - self.loop.now, call, *args)

    def _deliver(self, end: End, frame: bytes | None) -> None:
        if end.link.parted:
            end.link.held.append((end, frame))
        elif frame is None:
            end.other.arrive_end() if end.other.protocol is not None else self._end_early(end.other)
        else:
            end.other.arrive(frame)

    def _end_early(self, end: End) -> None:
        end.closed = True

    # Faults.

    def meet(self, link: Link) -> None:
        link.parted = False
        held, link.held = link.held, []
        for end, frame in held:
            self._in_order(end, self._deliver, end, frame)
        waiting, link.waiting = link.waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def break_off(self, link: Link) -> None:
        """Each side hears of it at its own time; what is under way is lost."""
        link.held.clear()
        for end in link.ends:
            if not end.closed:
                end.process.later(self.chance.uniform(0, 0.5), end.arrive_end)
        link.ends.clear()

    def process_died(self, process: Process, *, silently: float = 0.0) -> None:
        """The kernel closes what the process had open, or the machine went away without a word."""
        for link in self.links.values():
            for end in link.ends:
                if end.process is process and not end.closed:
                    end.closed = end.told = True
                    end.last = max(end.last, self.loop.now + silently)
                    self.send_end(end)
            link.ends = [end for end in link.ends if end.process is not process]
