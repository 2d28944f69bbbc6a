"""The executor process: puts its parts together, serves until a signal, and ends everything in order."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import logging
import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import uvloop

import ficc.logs
from ficc import __version__, clock
from ficc.domain import lease
from ficc.domain.attempt import Outcome, RequestStop
from ficc.domain.errors import Reason, Refused, invalid
from ficc.domain.placement import ENDPOINT_VERSION
from ficc.domain.plan import Fence, Limits, Plan
from ficc.executor import abandoned, acceptance, logs, machine, outputs, questions
from ficc.executor.attempts import Attempts
from ficc.executor.cgroups import Tree
from ficc.executor.guard import Watchdog, WatchdogLost
from ficc.executor.ledger import Entry, Ledger
from ficc.executor.providers.contract import API_VERSION, GROUP, Configuration, Provider
from ficc.executor.server import Server
from ficc.executor.settings import ExecutorSettings
from ficc.images.store import ImageStore
from ficc.process import freeze_garbage_collector, raise_open_files
from ficc.settings import load

LOCK_SECONDS = 15.0
"""How long to wait for an earlier executor's watchdog to be done."""
LOCK_POLL_SECONDS = 0.05
SHUTDOWN_GRACE_SECONDS = 5.0
SNAPSHOT_SECONDS = 2.0
"""How often what is free is measured and told."""

log = logging.getLogger("ficc.executor")


class AlreadyRunning(Exception):
    """Another executor holds this state directory."""


class Executor:
    """The parts of one executor, and what its socket offers."""

    def __init__(
        self, settings: ExecutorSettings, ledger: Ledger, provider: Provider, tree: Tree, watchdog: Watchdog
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.provider = provider
        self.tree = tree
        self.watchdog = watchdog
        self.images = ImageStore(settings.images_directory)
        self.attempts = Attempts(
            settings=settings,
            ledger=ledger,
            provider=provider,
            images=self.images,
            tree=tree,
            watchdog=watchdog,
            capacity=self._capacity,
            on_change=self._changed,
            on_peak=self._peaked,
        )
        self.server = Server(
            hello={
                "executor_id": ledger.executor_id,
                "boot_id": clock.boot_id(),
                "endpoint_version": ENDPOINT_VERSION,
                "release": __version__,
            },
            peers=settings.peers,
            dispatch=self._dispatch,
            find_gate=self.attempts.gate,
            snapshot=self.snapshot,
        )

    def _capacity(self) -> Limits:
        return machine.capacity(self.settings.reserve_memory_bytes, self.tree.ceiling())

    def _changed(self, entry: Entry) -> None:
        log.info("attempt %s is %s", entry.attempt_id, entry.record.state)
        self.server.publish({"attempt": entry.as_json()})

    def _peaked(self, attempt_id: str, peak_bytes: int) -> None:
        self.server.publish({"peaks": {attempt_id: peak_bytes}})

    def snapshot(self) -> dict[str, Any]:
        """What the executor offers, what of it is free by measurement, and every attempt it knows."""
        held = self.ledger.holding()
        capacity = self._capacity()
        free = machine.free(capacity, [(e.plan.limits, self.tree.group(e.attempt_id)) for e in held])
        return {
            "snapshot": {
                "executor_id": self.ledger.executor_id,
                "boot_id": clock.boot_id(),
                "release": __version__,
                "endpoint_version": ENDPOINT_VERSION,
                "accounts": "dedicated" if self.settings.accounts else "own",
                "machine": machine.description(),
                "capacity": capacity.as_json(),
                "free": free.as_json(),
                "unenforceable": self.attempts.unenforceable(),
                "quarantined": {
                    e.attempt_id: e.record.quarantine.message for e in held if e.record.quarantine is not None
                },
                "runtimes": [
                    {
                        "provider": self.provider.name,
                        "package_digest": self.provider.package_digest,
                        "image_digest": image.image_digest,
                        "isolation": self.provider.isolation,
                        "network": "none",
                        "name": image.name,
                        "created_at": image.created_at,
                    }
                    for image in self.images.list()
                ],
            },
            "attempts": [entry.as_json() for entry in held],
            "peaks": self.attempts.peaks.all(),
        }

    async def _dispatch(self, operation: str, call: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._carry_out(operation, call)
        except (WatchdogLost, sqlite3.Error) as error:  # without either nothing may run
            self.settings.on_fault(error)
            raise Refused("executor_unavailable", f"The executor is ending: {error}.") from error

    async def _carry_out(self, operation: str, call: dict[str, Any]) -> dict[str, Any]:
        match operation:
            case "snapshot":
                return self.snapshot()
            case "status":
                entry = self.ledger.get(call["attempt_id"])
                return {
                    "attempt": None if entry is None else entry.as_json(),
                    "lease": self.attempts.leases.told(call["attempt_id"]),
                }
            case "admit":
                entry = await self.attempts.admit(
                    _fence(call), Plan.from_json(call["plan"]), _renewal(call["lease"])
                )
                return {"attempt": entry.as_json()}
            case "start":
                return {"attempt": self.attempts.start(_fence(call)).as_json()}
            case "stop":
                return {"attempt": self.attempts.stop(_fence(call), *_stop(call)).as_json()}
            case "renew":
                return {"results": [await self._renew(one) for one in call["leases"]]}
            case "log":
                data, cut = await asyncio.to_thread(
                    logs.tail, self.settings.logs_directory, self.attempts.entry(_fence(call)).attempt_id
                )
                return {"text": data.decode("utf-8", "replace"), "truncated": cut}
            case "last_line":
                return {"line": await asyncio.to_thread(self.attempts.last_line, _fence(call))}
            case "alive":
                gate = self.attempts.gate(_fence(call))
                answers = await questions.alive(gate, _seconds(call))
                return {"answers": answers, "waiting_seconds": gate.waiting_seconds}
            case "ask":
                gate, body = self.attempts.gate(_fence(call)), json.dumps(call["body"]).encode()
                return {"answers": await questions.works(gate, str(call["path"]), body, _seconds(call))}
            case "output":
                return await self._output(_fence(call), call)
            case "discard":
                await asyncio.to_thread(self.attempts.discard, _fence(call))
                return {}
            case _:
                raise Refused("not_found", f"This executor has no operation {operation!r}.", "op")

    async def _output(self, fence: Fence, call: dict[str, Any]) -> dict[str, Any]:
        """A part of the log, or of an output of an attempt that has ended."""
        name, offset, limit = call.get("name"), int(call["offset"]), int(call["limit"])
        if offset < 0 or not 0 < limit <= outputs.READ_BYTES_MAX:
            raise invalid(
                f"A part begins at 0 or later and has 1 to {outputs.READ_BYTES_MAX} bytes.", "limit"
            )
        if name is None:
            attempt_id = self.attempts.entry(fence).attempt_id
            piece = await asyncio.to_thread(
                outputs.piece_of_log, self.settings.logs_directory, attempt_id, offset, limit
            )
        else:
            piece = await asyncio.to_thread(self.attempts.read_output, fence, str(name), offset, limit)
        return {
            "data": base64.b64encode(piece.data).decode(),
            "offset": piece.offset,
            "bytes_total": piece.bytes_total,
            "truncated": piece.truncated,
        }

    async def _renew(self, one: dict[str, Any]) -> dict[str, Any]:
        fence = _fence(one)
        try:
            self.attempts.entry(fence)
            deadline_ns = await self.attempts.leases.renew(fence.attempt_id, _renewal(one["lease"]))
        except Refused as refused:
            return {"attempt_id": fence.attempt_id, "refused": refused.reason.as_json()}
        return {"attempt_id": fence.attempt_id, "deadline_ns": deadline_ns}

    async def measure(self) -> None:
        """Measure what is taken and what is free, now and then, and tell subscribers."""
        while True:
            await asyncio.sleep(SNAPSHOT_SECONDS)
            self.ledger.catch_up()
            self.attempts.measure()
            self.server.publish({"snapshot": self.snapshot()["snapshot"]})


def _fence(call: dict[str, Any]) -> Fence:
    fence = call["fence"]
    return acceptance.check_fence(
        Fence(str(fence["attempt_id"]), int(fence["generation"]), str(fence["plan_digest"]))
    )


def _stop(call: dict[str, Any]) -> tuple[RequestStop, float]:
    reason = Reason(str(call["reason"]["code"]), str(call["reason"]["message"]))
    outcome, grace_seconds = Outcome(call["outcome"]), float(call["grace_seconds"])
    if outcome not in (Outcome.CANCELLED, Outcome.FAILED) or not grace_seconds >= 0:
        raise invalid("A stop ends cancelled or failed, after a grace of 0 seconds or more.", "outcome")
    return RequestStop(reason, outcome), grace_seconds


def _seconds(call: dict[str, Any]) -> float:
    seconds = float(call["within_seconds"])
    if not 0 < seconds <= questions.SECONDS_MAX:
        raise invalid(
            f"An answer is awaited for at most {questions.SECONDS_MAX:.0f} seconds.", "within_seconds"
        )
    return seconds


def _renewal(document: dict[str, Any]) -> lease.Renew:
    return lease.Renew(
        sequence=int(document["sequence"]),
        boot_id=str(document["boot_id"]),
        sent_ns=int(document["sent_ns"]),
        ttl_seconds=int(document["ttl_seconds"]),
    )


def load_provider(settings: ExecutorSettings) -> Provider:
    """The installed provider of this name, configured."""
    for entry in entry_points(group=GROUP, name=settings.provider):
        provider: Provider = entry.load()()
        if provider.API_VERSION != API_VERSION:
            raise SystemExit(
                f"executor: provider {settings.provider} has API version {provider.API_VERSION}."
            )
        provider.configure(Configuration(settings.accounts, settings.state_directory))
        return provider
    raise SystemExit(f"executor: no provider named {settings.provider} is installed.")


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[int]:
    """An exclusive lock on a file, waited for. Its descriptor can be inherited: the lock lives as long as
    any copy of it. Raises AlreadyRunning."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for _ in range(1 + int(seconds / LOCK_POLL_SECONDS)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_SECONDS)
        else:
            raise AlreadyRunning(f"{path} is held by another process.")
        yield fd
    finally:
        os.close(fd)


def open_ledger(path: Path) -> Ledger:
    """Raises SystemExit for one that cannot be used, which is left as it is."""
    try:
        return Ledger(path, machine.identity())
    except (sqlite3.Error, ValueError, KeyError, Refused) as error:
        raise SystemExit(
            f"executor: the ledger {path} cannot be used: {error}. Put back a good copy; or move it away, and the "
            "executor begins as another node."
        ) from None


async def serve(settings: ExecutorSettings) -> None:
    """Run until SIGTERM or SIGINT, or until the watchdog is lost."""
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    faults: list[str] = []

    def fault(error: BaseException | None) -> None:
        faults.append(f"{type(error).__name__}: {error}")
        log.error("a fault of ours; shutting down", exc_info=error)
        ending.set()

    settings = replace(settings, on_fault=fault)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    ledger = open_ledger(settings.state_directory / "ledger.sqlite")
    tree = Tree(f"{abandoned.PREFIX}{ledger.executor_id}")
    held = abandoned.hold(tree)
    for name in abandoned.remove_abandoned(tree):
        log.info("removed the empty cgroups %s, whose executor is gone", name)
    with locked(settings.state_directory / "watchdog.lock", LOCK_SECONDS) as lock:
        watchdog = await Watchdog.start(settings.verdicts_directory, lock)
    executor = Executor(settings, ledger, load_provider(settings), tree, watchdog)
    try:
        await executor.attempts.recover()
        freeze_garbage_collector()
        listener = await executor.server.listen(str(settings.socket))
        log.info("executor %s listens on %s", ledger.executor_id, settings.socket)
        await _until_it_ends(ending, executor, faults)
        listener.close()
        # After a fault nothing runs on: it may be the watchdog that is missing.
        if not await executor.attempts.shutdown(0.0 if faults else SHUTDOWN_GRACE_SECONDS):
            faults.append("some attempts could not be cleaned up; the watchdog goes on killing")
    finally:
        settings.socket.unlink(missing_ok=True)
        await watchdog.close()
        tree.remove()
        ledger.close()
        if held is not None:
            os.close(held)
    if faults:
        raise SystemExit(f"executor: {faults[0]}")


async def _until_it_ends(ending: asyncio.Event, executor: Executor, faults: list[str]) -> None:
    """Until a signal, a fault, or the loss of the watchdog."""
    measuring = asyncio.create_task(executor.measure())
    lost = asyncio.create_task(executor.watchdog.lost())
    ended = asyncio.create_task(ending.wait())
    await asyncio.wait({ended, lost, measuring}, return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        faults.append("the watchdog ended")
        log.error("the watchdog ended; every sandbox is being ended")
    if measuring.done():
        executor.settings.on_fault(measuring.exception())
    for task in (measuring, lost, ended):
        task.cancel()


def prepare_directories(settings: ExecutorSettings) -> None:
    """Make what is missing; all of it is the executor's alone, but the way to its socket."""
    settings.state_directory.mkdir(parents=True, exist_ok=True)
    settings.state_directory.chmod(0o700)
    for directory in (settings.images_directory, settings.logs_directory, settings.verdicts_directory):
        directory.mkdir(exist_ok=True)
    settings.socket.parent.mkdir(parents=True, exist_ok=True)


def keep_descriptors_private() -> None:
    """What our parents left open is not handed on to our children."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed already
            if int(name) > 2:
                os.set_inheritable(int(name), False)


def run(settings: ExecutorSettings) -> None:
    """The whole life of an executor process."""
    raise_open_files()
    os.umask(0o022)
    keep_descriptors_private()
    prepare_directories(settings)
    try:
        with locked(settings.state_directory / "executor.lock", 0):
            uvloop.run(serve(settings))
    except AlreadyRunning as error:
        print(f"executor: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def check() -> None:
    """What this machine can enforce, as JSON on standard output; starts nothing."""
    executor = ExecutorSettings(Path(), Path(), Path(), provider=load().executor.provider)
    tree = Tree(f"ficc-check-{os.getpid()}")
    unenforceable = {**tree.unenforceable, **load_provider(executor).unenforceable()}
    kinds = [*(["v1"] if tree.v1 else []), *(["v2"] if tree.v2 else [])]
    tree.remove()
    report = {
        "unenforceable": unenforceable,
        "cgroups": " and ".join(kinds) or "none",
        "accounts": "dedicated" if executor.accounts else "the executor's own",
    }
    print(json.dumps(report))


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        check()
        return
    settings = load(*(Path(argument) for argument in sys.argv[1:2]))
    ficc.logs.configure(settings.log, "executor")
    run(
        ExecutorSettings(
            state_directory=settings.executor_directory,
            content_directory=settings.content_directory,
            socket=settings.executor_socket,
            peers=frozenset({settings.controller_uid}),
            uid_base=settings.executor.uid_base,
            reserve_memory_bytes=settings.executor.reserve_memory_bytes,
            provider=settings.executor.provider,
        )
    )
