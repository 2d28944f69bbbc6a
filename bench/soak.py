"""A running installation under a mix of requests for some minutes, and whether anything of it is left afterwards.

    python -m bench.soak --minutes 10      (with the tests' directory in PYTHONPATH; `make soak MINUTES=10` sets it)

Answers as JSON and as streams, refusals of every kind, clients that leave at random places or never read, and engines
that are killed meanwhile and come back. At the end nothing is in flight, memory, file descriptors and tasks have not
grown, and there is exactly one usage record of each request, which says what its client saw. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import tasks
from contract.scripted import ScriptedInstallation

REPLICAS, CONCURRENCY = 2, 4
CLIENTS = 16
DEADLINE_SECONDS = 20
WARM_SECONDS = 15.0
"""Of the same load, before what is compared is counted."""
KILL_SECONDS = (10.0, 25.0)
"""Between the deaths of two engines."""
KILL_ALL_SHARE = 0.3
THINK_SECONDS_MAX = 0.05
SLOW_SECONDS = (0.5, 4.0)
"""How long a client that never reads stays."""
PATIENCE_SECONDS = 60.0
SAMPLE_SECONDS = 5.0
SLOPE_MINUTES_MIN = 5.0
"""A shorter run says nothing of memory a minute."""
SLOPE_MIB_PER_MINUTE_MAX = 2.0
GROWTH_MIB_MAX = 16.0
"""From the first fifth of the second half to its last."""
SLACK = 4
"""File descriptors and tasks of work that comes and goes by itself."""
MIB = 1 << 20
EVENTS = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = "data: [DONE]\n\n"


@dataclass
class Seen:
    """What one client saw of its request. `recorded`: a record is due; `whole`: of the answer; `code`: of the error."""

    kind: str
    recorded: bool = True
    status: int | None = None
    whole: bool = False
    code: str | None = None


@dataclass
class Load:
    """Clients, each of which sends one request after another, and what they saw by the ids of their requests."""

    installation: ScriptedInstallation
    service_id: str
    limited_token: str
    seen: dict[str, Seen] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    kills: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(1)
        self.token, self.port = self.installation.token, self.installation.port
        self.path = f"/api/v1/inference/{self.service_id}/v1/chat/completions"
        self.kinds = {
            self._json: 30,
            self._stream: 30,
            self._slow_stream: 8,
            self._large: 1,
            self._leave: 20,
            self._never_read: 3,
            self._refused: 10,
            self._limited: 4,
            self._nobody: 3,
        }

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(self._kill(until), *(self._client(until) for _ in range(CLIENTS)))

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            (work,) = self.chance.choices(list(self.kinds), list(self.kinds.values()))
            try:
                await asyncio.wait_for(work(), PATIENCE_SECONDS)
            except (OSError, EOFError, TimeoutError) as error:
                self.faults.append(f"{work.__name__}: {error!r}")
            await asyncio.sleep(self.chance.random() * THINK_SECONDS_MAX)

    async def _kill(self, until: float) -> None:
        """An engine now and then, and sometimes all of them."""
        while (pause := self.chance.uniform(*KILL_SECONDS)) < until - time.monotonic():
            await asyncio.sleep(pause)
            engines = await asyncio.to_thread(engines_of, self.installation)
            count = len(engines) if self.chance.random() < KILL_ALL_SHARE else 1
            for pid in self.chance.sample(engines, min(count, len(engines))):
                os.kill(pid, signal.SIGKILL)
                self.kills += 1

    # What clients do.

    async def _json(self) -> None:
        await self._whole("json", {})

    async def _stream(self) -> None:
        await self._whole("stream", {"stream": True})

    async def _slow_stream(self) -> None:
        pieces: list[str | float] = [EVENTS]
        for _ in range(self.chance.randrange(1, 12)):
            pieces += [EVENT, self.chance.random() * 0.2]
        await self._whole("slow stream", {"stream": True, "do": "raw", "pieces": [*pieces, DONE]})

    async def _large(self) -> None:
        await self._whole("large body", {"text": "x" * 300_000})

    async def _refused(self) -> None:
        body = self.chance.choice([{"model": "other"}, {"stream": "yes"}, {"a": float("nan")}])
        await self._whole("refused", body)

    async def _limited(self) -> None:
        await self._whole("limited", {}, token=self.limited_token)

    async def _nobody(self) -> None:
        await self._whole("nobody", {}, token="ficc_" + "0" * 43, recorded=False)

    async def _leave(self) -> None:
        """Anywhere: in the head, in the body, in the queue, before the answer, in it."""
        stream = self.chance.random() < 0.7
        do = (
            self.chance.choice(["speak", "hang", "pour"]) if stream else self.chance.choice(["speak", "hang"])
        )
        seen, request, head_bytes = self._request("leave", {"do": do, "stream": stream})
        cut = self.chance.randrange(1, len(request)) if self.chance.random() < 0.2 else len(request)
        seen.recorded = cut >= head_bytes
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request[:cut])
            await writer.drain()
            for _ in range(self.chance.randrange(4)):
                async with asyncio.timeout(self.chance.random()):
                    await reader.read(self.chance.randrange(1, 65536))
        except TimeoutError:
            pass  # it has waited long enough
        finally:
            await self._close(writer)

    async def _never_read(self) -> None:
        _, request, _ = self._request("never read", {"do": "pour", "stream": True})
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        try:
            writer.write(request)
            await asyncio.sleep(self.chance.uniform(*SLOW_SECONDS))
        finally:
            await self._close(writer)

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        if self.chance.random() < 0.3:
            writer.transport.abort()
        else:
            writer.close()

    # Requests.

    def _request(
        self, kind: str, body: dict[str, Any], token: str | None = None, recorded: bool = True
    ) -> tuple[Seen, bytes, int]:
        """What is to be noted of it, its bytes, and how many of them are its head."""
        request_id = f"soak-{len(self.seen)}"
        seen = self.seen[request_id] = Seen(kind, recorded)
        content = json.dumps(body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token or self.token}\r\n"
            f"X-Request-Id: {request_id}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        ).encode()
        return seen, head + content, len(head)

    async def _whole(
        self, kind: str, body: dict[str, Any], token: str | None = None, recorded: bool = True
    ) -> None:
        """A request whose client reads all of its answer."""
        seen, request, _ = self._request(kind, body, token, recorded)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            seen.status = int(head.split()[1])
            try:
                content = await _content(reader, head)
            except asyncio.IncompleteReadError:
                return  # broken off, as it is where an event was cut
            self._note(seen, content, streamed=b"text/event-stream" in head)
        finally:
            writer.close()

    def _note(self, seen: Seen, content: bytes, *, streamed: bool) -> None:
        last = content.rstrip().rpartition(b"\n\n")[2].removeprefix(b"data: ")
        if streamed and last == b"[DONE]":
            seen.whole = True
            return
        try:
            error = json.loads(last if streamed else content).get("error")
        except ValueError:
            error = None
            self.faults.append(f"{seen.kind}: {seen.status} ended with {content[-200:]!r}")
        if error is not None:
            seen.code = error["code"]
        elif streamed:
            self.faults.append(f"{seen.kind}: a stream ended without [DONE] or an error")
        else:
            seen.whole = True
        if seen.status == 500:
            self.faults.append(f"{seen.kind}: {content[:200]!r}")


async def _content(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """The body of an answer. Raises IncompleteReadError where it is cut."""
    if b"transfer-encoding: chunked" not in head:
        length = head.partition(b"content-length:")[2].split()[0]
        return await reader.readexactly(int(length))
    found = bytearray()
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        found += (await reader.readexactly(size + 2))[:size]
        if not size:
            return bytes(found)


def engines_of(installation: ScriptedInstallation) -> list[int]:
    """The processes of engines that run now."""
    found = []
    for process in psutil.Process(installation.processes["executor"].pid).children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command[1:2] == ["-IB"] and command[2].startswith("/inputs/"):
            found.append(process.pid)
    return found


# What the processes hold.


@dataclass(frozen=True)
class Held:
    descriptors: int
    threads: int
    tasks: int


NAMES = ("controller", "executor")


def held(installation: ScriptedInstallation, name: str) -> Held:
    process = psutil.Process(installation.processes[name].pid)
    return Held(process.num_fds(), process.num_threads(), tasks.count(f"ficc.{name}"))


async def sample(installation: ScriptedInstallation, into: dict[str, list[tuple[float, float]]]) -> None:
    """Resident MiB of each process and the minute it was taken at."""
    began = time.monotonic()
    while True:
        for name in NAMES:
            resident = psutil.Process(installation.processes[name].pid).memory_info().rss
            into[name].append(((time.monotonic() - began) / 60, resident / MIB))
        await asyncio.sleep(SAMPLE_SECONDS)


def until_idle(installation: ScriptedInstallation, service_id: str) -> None:
    def idle() -> bool:
        record = installation.record(service_id)
        return record["state"] == "ready" and not any(one["in_flight"] for one in record["replicas"])

    installation.until(idle, "the service is ready and nothing is in flight", seconds=PATIENCE_SECONDS)
    time.sleep(3 * tasks.SECONDS)  # so that what is counted is what is there


async def every_slot_is_free(load: Load) -> None:
    """As many streams as there are slots are open at once: none is held for a request that ended."""
    writers = []
    try:
        async with asyncio.timeout(DEADLINE_SECONDS / 2):
            for _ in range(REPLICAS * CONCURRENCY):
                _, request, _ = load._request("slot", {"do": "hang", "stream": True})
                reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
                writers.append(writer)
                writer.write(request)
                await reader.readuntil(b"hello")
    except TimeoutError:
        load.faults.append(f"of {REPLICAS * CONCURRENCY} slots {len(writers) - 1} were free at the end")
    finally:
        for writer in writers:
            writer.close()


# Records.


def records(installation: ScriptedInstallation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    query = {"limit": "200"}
    while True:
        page = installation.http("GET", "/usage", **query).ok()
        found += page["items"]
        if page["next"] is None:
            return [one for one in found if one["request_id"].startswith("soak-")]
        query["after"] = page["next"]


def compare(installation: ScriptedInstallation, load: Load) -> list[str]:
    """What is wrong with the records of what was sent."""
    due = {request_id for request_id, seen in load.seen.items() if seen.recorded}
    until = time.monotonic() + PATIENCE_SECONDS
    found = records(installation)
    while sum(one["requests"] for one in found) < len(due) and time.monotonic() < until:
        time.sleep(1.0)
        found = records(installation)
    counted = collections.Counter(one["request_id"] for one in found)
    problems = _without_a_record(load, sorted(due - set(counted)), found)
    problems += [f"{counted[one]} records of {one}" for one in sorted(counted) if counted[one] > 1]
    problems += [f"a record of {one}, which never asked" for one in sorted(set(counted) - due)]
    for record in found:
        seen = load.seen[record["request_id"]]
        if seen.whole:
            expected: tuple[Any, ...] = ("completed", None)
        elif seen.code is not None:
            expected = ("failed" if record["outcome"] == "failed" else "refused", seen.code)
        else:
            continue
        if (record["outcome"], record["code"]) != expected:
            said = (record["outcome"], record["code"])
            problems.append(
                f"{record['request_id']} ({seen.kind}): recorded {said}, its client saw {expected}"
            )
    return problems


def _without_a_record(load: Load, missing: list[str], found: list[dict[str, Any]]) -> list[str]:
    """What is wrong with them: only refusals of a flood have no record of their own, and these are counted in one of
    the same code. Of a client that left without an answer only the number is known."""
    together: collections.Counter[str] = collections.Counter()
    for record in found:
        if record["requests"] > 1:
            together[record["code"]] += record["requests"] - 1
    told = collections.Counter(code for one in missing if (code := load.seen[one].code) is not None)
    problems = [f"{one} was answered whole and has no record" for one in missing if load.seen[one].whole]
    if told - together or len(missing) != together.total():
        problems += [f"no record of {one} ({load.seen[one].kind})" for one in missing]
        problems.append(f"{len(missing)} requests have no record of their own ({told}), {together} share one")
    elif missing:
        print(f"{len(missing)} refusals of a flood share records: {dict(together)}")
    return problems


def growth(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the second half: MiB a minute, and MiB from its first fifth to its last."""
    half = samples[len(samples) // 2 :]
    fifth = max(1, len(half) // 5)
    slope = statistics.linear_regression(*zip(*half, strict=True)).slope if len(half) > 1 else 0.0
    first, last = half[:fifth], half[-fifth:]
    return slope, statistics.fmean(m for _, m in last) - statistics.fmean(m for _, m in first)


# All of it.


def soak(installation: ScriptedInstallation, minutes: float) -> list[str]:
    """What is broken."""
    service = installation.service(
        "soak",
        REPLICAS,
        concurrency=CONCURRENCY,
        deadline_seconds=DEADLINE_SECONDS,
        restart={"on_failure": {"delay_seconds": 1, "factor": 1, "stable_seconds": 1}},
    )
    limits = {"requests_per_minute": 60, "concurrency": 1}
    wanted = {"label": "limited", "scopes": ["inference:invoke"], "limits": limits}
    limited = installation.http("POST", "/tokens", wanted).ok(201)["token"]
    load = Load(installation, service["id"], limited)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}

    async def measured() -> None:
        sampling = asyncio.create_task(sample(installation, samples))
        await load.run(minutes * 60)
        sampling.cancel()

    asyncio.run(load.run(WARM_SECONDS))
    until_idle(installation, service["id"])
    before = {name: held(installation, name) for name in NAMES}
    asyncio.run(measured())
    until_idle(installation, service["id"])
    after = {name: held(installation, name) for name in NAMES}
    asyncio.run(every_slot_is_free(load))
    until_idle(installation, service["id"])
    problems = [*load.faults, *compare(installation, load)]
    print(f"\n{len(load.seen)} requests in {minutes:g} minutes, {load.kills} engines killed\n")
    _print_requests(load)
    print("\n| process | MiB | MiB a minute | growth, MiB | file descriptors | threads | tasks |")
    print("|---|---|---|---|---|---|---|")
    for name in NAMES:
        slope, difference = growth(samples[name])
        then, now = before[name], after[name]
        print(
            f"| {name} | {samples[name][-1][1]:.1f} | {slope:+.2f} | {difference:+.1f} "
            f"| {then.descriptors} → {now.descriptors} | {then.threads} → {now.threads} "
            f"| {then.tasks} → {now.tasks} |"
        )
        if minutes >= SLOPE_MINUTES_MIN and slope > SLOPE_MIB_PER_MINUTE_MAX:
            problems.append(f"the {name}'s memory grew by {slope:.2f} MiB a minute")
        if difference > GROWTH_MIB_MAX:
            problems.append(f"the {name}'s memory grew by {difference:.1f} MiB")
        if now.descriptors > then.descriptors + SLACK or now.tasks > then.tasks + SLACK:
            problems.append(f"the {name} held {then} before and {now} afterwards")
    return problems


def _print_requests(load: Load) -> None:
    counted: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for seen in load.seen.values():
        counted[seen.kind]["whole" if seen.whole else seen.code or "left or broken off"] += 1
    print("| requests | how many | how they ended for their clients |")
    print("|---|---|---|")
    for kind, ends in sorted(counted.items()):
        told = ", ".join(f"{end} {number}" for end, number in ends.most_common())
        print(f"| {kind} | {ends.total()} | {told} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ficc-soak-") as directory:
        Path(directory).chmod(0o755)  # the controller has an account of its own
        os.environ[tasks.DIRECTORY] = directory
        installation = ScriptedInstallation(
            Path(directory), settings={"FICC_LOG_LEVEL": "warning", tasks.DIRECTORY: directory}
        )
        installation.command = ("-m", "bench.tasks")
        with installation:
            problems = soak(installation, options.minutes)
    for problem in problems[:40]:
        print(problem)
    print(
        f"\n{len(problems)} problems" if problems else "\nnothing is left, and every request has its record"
    )
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
