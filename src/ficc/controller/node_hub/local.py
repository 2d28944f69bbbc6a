"""The executor on this machine, reached over its unix socket: three connections, each for what must not wait
for the others. Control: calls and events. Leases: renewals alone. Endpoint: every invocation.

An executor that is stopped or hung keeps its sockets open, so it is asked for a sign of life all the time: one
that gives none for SILENCE_SECONDS is disconnected like one that is gone, and what waits for it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ficc import clock
from ficc.client.executor import CALL_SECONDS, Control, EndpointLink, EndpointStream, fence_document
from ficc.controller.node_hub.hub import Hub
from ficc.controller.operations.ports import Sign
from ficc.domain import attempt
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason, Refused
from ficc.domain.lease import Renew
from ficc.domain.plan import Fence

RECONNECT_SECONDS = 0.25
PULSE_SECONDS = 2.0
"""Between two signs of life."""
SILENCE_SECONDS = 10.0
"""How long an executor may take for one; a busy machine takes fractions of a second."""

log = logging.getLogger("ficc.controller")


class LocalLink:
    """A connected local executor."""

    def __init__(
        self,
        hello: Mapping[str, Any],
        on_report: Callable[[str], None],
        on_snapshot: Callable[[], None],
        on_peak: Callable[[str, int], None],
    ):
        self.node_id = str(hello["executor_id"])
        self.boot_id = str(hello["boot_id"])
        self.snapshot: dict[str, Any] = {}
        self._on_report = on_report
        self._on_snapshot = on_snapshot
        self._on_peak = on_peak
        self._reports: dict[str, attempt.Record] = {}
        self._reading = asyncio.Lock()
        self.control = Control(self._event)
        self.leases = Control()
        self.endpoint = EndpointLink()

    @property
    def connected(self) -> bool:
        return not any(c.lost.done() for c in (self.control, self.leases, self.endpoint))

    def _event(self, event: dict[str, Any]) -> None:
        if "attempt" in event:
            self._take(event["attempt"])
        if "snapshot" in event:
            self.snapshot = event["snapshot"]
            self._on_snapshot()
        self._take_peaks(event)

    def _take(self, document: dict[str, Any]) -> None:
        """A report, by event or as an answer; the two may overtake each other."""
        attempt_id, record = document["attempt_id"], attempt.from_json(document)
        known = self._reports.get(attempt_id)
        self._reports[attempt_id] = record if known is None else attempt.later(known, record)
        self._on_report(attempt_id)

    def _take_peaks(self, message: Mapping[str, Any]) -> None:
        for attempt_id, peak_bytes in message.get("peaks", {}).items():
            self._on_peak(str(attempt_id), int(peak_bytes))

    async def subscribe(self) -> None:
        answer = await self.control.call("subscribe")
        self.snapshot = answer["snapshot"]
        for document in answer["attempts"]:
            self._take(document)
        self._take_peaks(answer)

    async def learn(self, attempt_id: str) -> None:
        """Ask about one attempt: it may have been released meanwhile, or never admitted."""
        answer = await self.control.call("status", attempt_id=attempt_id)
        if answer["attempt"] is not None:
            self._take(answer["attempt"])

    async def until_lost(self) -> str:
        """Until a connection broke or the executor is silent; which of them, for people."""
        pulse = asyncio.create_task(self._feel_the_pulse())
        lost = [connection.lost for connection in (self.control, self.leases, self.endpoint)]
        try:
            await asyncio.wait({pulse, *lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pulse.cancel()
        broken = any(future.done() for future in lost)
        return "was lost" if broken else f"was given up: no sign of life for {SILENCE_SECONDS:.0f} s"

    async def _feel_the_pulse(self) -> None:
        """On the connection of leases: while it is silent nothing is renewed either."""
        while True:
            try:
                await self.leases.call("renew", SILENCE_SECONDS, leases=[])
            except Refused as refused:
                if refused.code == "executor_unavailable":
                    return
            await asyncio.sleep(PULSE_SECONDS)

    def close(self) -> None:
        for connection in (self.control, self.leases, self.endpoint):
            connection.close()

    # The ports.

    def reported(self, attempt_id: str) -> attempt.Record | None:
        return self._reports.get(attempt_id)

    def forget(self, attempt_id: str) -> None:
        """An attempt whose release was recorded is of no more interest."""
        self._reports.pop(attempt_id, None)

    async def open_stream(
        self, fence: Fence, path: str, body: bytes, deadline_seconds: float, *, by_data: bool = False
    ) -> EndpointStream:
        return await self.endpoint.open_stream(fence, path, body, deadline_seconds, by_data=by_data)

    async def admit(self, fence: Fence, plan: Mapping[str, Any], first: Renew) -> None:
        answer = await self.control.call("admit", fence=fence_document(fence), plan=plan, lease=asdict(first))
        self._take(answer["attempt"])

    async def start(self, fence: Fence) -> None:
        answer = await self.control.call("start", fence=fence_document(fence))
        self._take(answer["attempt"])

    async def stop(self, fence: Fence, reason: Reason, outcome: Outcome, grace_seconds: float) -> None:
        answer = await self.control.call(
            "stop",
            fence=fence_document(fence),
            reason=reason.as_json(),
            outcome=outcome.value,
            grace_seconds=grace_seconds,
        )
        self._take(answer["attempt"])

    async def renew(self, renewals: list[tuple[Fence, Renew]]) -> list[dict[str, Any]]:
        """On the connection of leases, which nothing else uses."""
        leases = [{"fence": fence_document(fence), "lease": asdict(renewal)} for fence, renewal in renewals]
        answer = await self.leases.call("renew", leases=leases)
        return list(answer["results"])

    async def upload(
        self,
        fence: Fence,
        model: str,
        input_ids: Sequence[str],
        deadline_seconds: float,
        on_progress: Callable[[Mapping[str, Any]], None],
    ) -> None:
        await self.endpoint.upload(fence, model, input_ids, deadline_seconds, on_progress)

    async def log(self, fence: Fence) -> tuple[str, bool]:
        answer = await self.control.call("log", fence=fence_document(fence))
        return str(answer["text"]), bool(answer["truncated"])

    async def last_line(self, fence: Fence) -> str:
        return str((await self.control.call("last_line", fence=fence_document(fence)))["line"])

    async def alive(self, fence: Fence, seconds: float) -> Sign:
        patience = 2 * seconds + CALL_SECONDS  # it connects first
        answer = await self.control.call(
            "alive", patience, fence=fence_document(fence), within_seconds=seconds
        )
        return Sign(bool(answer["answers"]), float(answer["waiting_seconds"]))

    async def ask(self, fence: Fence, path: str, body: Mapping[str, Any], seconds: float) -> bool:
        patience = 2 * seconds + CALL_SECONDS
        answer = await self.control.call(
            "ask", patience, fence=fence_document(fence), path=path, body=body, within_seconds=seconds
        )
        return bool(answer["answers"])

    async def output(self, fence: Fence, name: str | None, offset: int, limit: int) -> Mapping[str, Any]:
        """One part at a time: they are large, and reports share the connection."""
        async with self._reading:
            return await self.control.call(
                "output", fence=fence_document(fence), name=name, offset=offset, limit=limit
            )

    async def discard(self, fence: Fence) -> None:
        await self.control.call("discard", fence=fence_document(fence))

    def lease_clock(self) -> tuple[str, int]:
        """This machine's own: the executor reads the same."""
        return self.boot_id, clock.now_ns()


class LocalNode:
    """Keeps the local executor connected, and the hub told."""

    def __init__(self, hub: Hub, socket: Path) -> None:
        self._hub = hub
        self._socket = socket

    async def run(self) -> None:
        waiting = False
        while True:
            try:
                link = await self._connect()
            except Refused as refused:
                if not waiting:
                    log.info("waiting for the executor: %s", refused.message)
                waiting = True
                await asyncio.sleep(RECONNECT_SECONDS)
                continue
            waiting = False
            try:
                await self._hub.joined(link)
                log.warning("the connection to the executor %s", await link.until_lost())
            except Refused as refused:
                log.warning("the executor was not taken in: %s", refused)
                await asyncio.sleep(RECONNECT_SECONDS)
            finally:
                link.close()
                self._hub.left(link)

    async def _connect(self) -> LocalLink:
        probe = Control()
        hello = await probe.open(self._socket, "control")
        probe.close()
        link = LocalLink(hello, self._hub.reported, lambda: self._hub.measured(link), self._hub.on_peak)
        try:
            for connection, role in (
                (link.control, "control"),
                (link.leases, "control"),
                (link.endpoint, "endpoint"),
            ):
                await connection.open(self._socket, role)
            await link.subscribe()
        except BaseException:
            link.close()
            raise
        return link
