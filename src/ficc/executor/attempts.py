"""The attempts of this executor: from admission to proof of cleanup, each step durable before it is taken.

The runner of an attempt is the only writer of its record while it runs. Whatever an earlier run of the
executor left is ended and proved empty at start (`recover`), never adopted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ficc import clock
from ficc.content.store import ContentStore
from ficc.domain import attempt, lease
from ficc.domain.attempt import Outcome
from ficc.domain.errors import Reason, Refused
from ficc.domain.plan import Fence, Limits, Plan
from ficc.executor import acceptance, endings, guard, logs
from ficc.executor.cgroups import Tree
from ficc.executor.endpoint import Gate
from ficc.executor.guard import Leases, Watchdog
from ficc.executor.inputs import Inputs
from ficc.executor.ledger import Entry, Ledger
from ficc.executor.logs import AttemptLog
from ficc.executor.outputs import Outputs, Piece
from ficc.executor.peaks import Peaks
from ficc.executor.providers.contract import Launch, LaunchFailed, Provider, Sandbox
from ficc.executor.settings import ExecutorSettings
from ficc.failpoints import failpoint
from ficc.images.store import ImageStore

CLEANUP_RETRY_SECONDS = 1.0
QUARANTINE_SECONDS = 10.0
"""How long cleaning up may take until it is said that something is in its way."""
GIVE_UP_SECONDS = 0.05
"""Between two kills of a sandbox that is stopped while it is made."""
RECOVER_SECONDS = 10.0
"""How long a start waits until what an earlier run left is gone; what takes longer holds its reservation."""
SHUTDOWN_SECONDS = 30.0
GRACE_SECONDS_MAX = 60.0
LAST_WORDS = "Its last words follow, its log has all of them:"

State = attempt.State

log = logging.getLogger("ficc.executor")


@dataclass(slots=True)
class Running:
    """What lives of an attempt in this process. `stop` asks it to end, `kill` ends its grace."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    kill: asyncio.Event = field(default_factory=asyncio.Event)
    gate: Gate | None = None


class Attempts:
    """`on_change` is told of every entry once its new record is durable."""

    def __init__(
        self,
        *,
        settings: ExecutorSettings,
        ledger: Ledger,
        provider: Provider,
        images: ImageStore,
        tree: Tree,
        watchdog: Watchdog,
        capacity: Callable[[], Limits],
        on_change: Callable[[Entry], None],
        on_peak: Callable[[str, int], None],
    ) -> None:
        self._settings = settings
        self._inputs = Inputs(ContentStore(settings.content_directory), ledger)
        self._ledger = ledger
        self._provider = provider
        self._images = images
        self._tree = tree
        self._capacity = capacity
        self._on_change = on_change
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._keeping = asyncio.Lock()
        """Held while outputs are copied, of one attempt after the other."""
        self.outputs = Outputs(settings.outputs_directory)
        self.leases = Leases(watchdog, self._lapsed)
        self.peaks = Peaks(on_peak)

    # What callers ask for.

    def entries(self) -> list[Entry]:
        return self._ledger.entries()

    def entry(self, fence: Fence) -> Entry:
        """The attempt of a fence. Raises Refused `attempt_unknown`, `fenced`."""
        entry = self._ledger.get(fence.attempt_id)
        if entry is None:
            raise Refused("attempt_unknown", f"This executor never admitted {fence.attempt_id}.")
        if entry.fence != fence:
            raise Refused("fenced", "The attempt is known under another generation or plan.")
        return entry

    def gate(self, fence: Fence) -> Gate:
        """The endpoint of a running attempt. Raises Refused; then no engine saw anything."""
        running = self._running.get(fence.attempt_id)
        if running is None or running.gate is None:
            self.entry(fence)
            raise Refused("service_not_ready", "The attempt is not running.", retry_after_seconds=1)
        running.gate.check(fence)
        return running.gate

    async def admit(self, fence: Fence, plan: Plan, first: lease.Renew) -> Entry:
        """Reserve what the plan asks for, under a first lease. The same request again has the same answer.

        Raises Refused; then nothing is reserved.
        """
        if self._ledger.get(fence.attempt_id) is not None:
            return self.entry(fence)
        self._refuse_when_closing()
        self._refuse_what_was_refused(fence)
        self.leases.check(first)
        try:
            self._judge(fence, plan)
            record = attempt.advance(attempt.Record(), attempt.Admit())
            entry = Entry(fence, plan, record, clock.boot_id(), self._ledger.free_account_number())
            # Before the first await: two admissions never count the same room, and a stop finds the attempt.
            self._ledger.add(entry)
        except Refused as refused:
            self._ledger.reject(fence, refused)
            raise
        failpoint("executor.admitted")
        self._running[entry.attempt_id] = Running()
        self._on_change(entry)
        await self.leases.grant(entry.attempt_id, self._tree.group(entry.attempt_id), first)
        failpoint("executor.leased")
        self._spawn(self._stage(entry.attempt_id))
        return self.entry(fence)

    def _judge(self, fence: Fence, plan: Plan) -> None:
        """Raises Refused for what this executor does not take."""
        acceptance.check(fence, plan, self._ledger.executor_id, self._provider)
        self._images.get(plan.runtime.image_digest)
        held = (entry.plan.limits for entry in self._ledger.holding())
        acceptance.check_room(plan.limits, self._capacity(), held, self.unenforceable())

    def _refuse_what_was_refused(self, fence: Fence) -> None:
        """An answer stands: whoever lost it may ask again, and never runs what it was told will not run."""
        rejection = self._ledger.rejection(fence.attempt_id)
        if rejection is None:
            return
        known, refused = rejection
        if known != fence:
            raise Refused("fenced", "The attempt was refused under another generation or plan.")
        raise Refused(refused.code, refused.message, refused.param)

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise Refused("executor_unavailable", "The executor is shutting down.", retry_after_seconds=1)

    def unenforceable(self) -> dict[str, str]:
        """Limits that this machine cannot enforce, each with why and what to do."""
        return {**self._tree.unenforceable, **self._provider.unenforceable()}

    def start(self, fence: Fence) -> Entry:
        """Start a prepared attempt, once: the intent is durable before this returns, and asking again
        only tells how far it is. Raises Refused."""
        entry = self.entry(fence)
        if entry.record.state in (State.ADMITTED, State.STAGING):
            raise Refused(
                "action_not_allowed", "The attempt is still being staged; wait until it is prepared."
            )
        if entry.record.state is not State.PREPARED:
            return entry
        self._refuse_when_closing()
        entry = self._advance(entry.attempt_id, attempt.IntendStart())
        failpoint("executor.start_intended")
        self._spawn(self._run(entry))
        return entry

    def stop(self, fence: Fence, event: attempt.RequestStop, grace_seconds: float) -> Entry:
        """End an attempt: SIGTERM, and after the grace the whole sandbox. Raises Refused."""
        return self._request_stop(self.entry(fence), event, min(grace_seconds, GRACE_SECONDS_MAX))

    def _request_stop(self, entry: Entry, event: attempt.RequestStop, grace_seconds: float) -> Entry:
        if entry.record.state not in attempt.LIVE:
            return entry
        started = entry.record.start_intended
        already = entry.record.state is State.STOPPING
        entry = self._advance(entry.attempt_id, event)
        failpoint("executor.stop_requested")
        running = self._running[entry.attempt_id]
        if running.gate is not None:
            running.gate.close(Refused("service_stopped", "The replica is being stopped."))
        running.stop.set()
        # The shortest grace of all who ask counts.
        asyncio.get_running_loop().call_later(grace_seconds, running.kill.set)
        if not started and not already:
            self._spawn(self._finish(entry.attempt_id, attempt.End(Outcome.CANCELLED, event.reason), None))
        return entry

    def _lapsed(self, attempt_id: str) -> None:
        entry = self._ledger.get(attempt_id)
        if entry is not None:
            self._request_stop(entry, attempt.RequestStop(endings.LAPSED, Outcome.FAILED), 0.0)

    # One attempt's way.

    async def _stage(self, attempt_id: str) -> None:
        """Inputs are bound from the content store, never copied: here they have to be there, and right."""
        if self._state(attempt_id) is not State.ADMITTED:
            return  # stopped before it began
        entry = self._advance(attempt_id, attempt.BeginStaging())
        event: attempt.Event = attempt.Prepare()
        try:
            await self._inputs.verified(entry.plan, self._running[attempt_id].stop.is_set)
        except Refused as refused:
            event = attempt.End(Outcome.FAILED, refused.reason)
        if self._state(attempt_id) is not State.STAGING:
            return  # stopped meanwhile
        if isinstance(event, attempt.Prepare):
            self._advance(attempt_id, event)
            failpoint("executor.prepared")
        else:
            await self._finish(attempt_id, event, None)

    async def _run(self, entry: Entry) -> None:
        """Launch, watch, end. The start intent is durable by now."""
        attempt_id = entry.attempt_id
        running = self._running[attempt_id]
        sandbox: Sandbox | None = None
        with contextlib.ExitStack() as held:
            try:
                log = held.enter_context(
                    contextlib.closing(AttemptLog(self._settings.logs_directory, attempt_id))
                )
                sandbox = await self._launch(entry, running, log)
                self._began(entry, running, sandbox)
                event = await self._watch(entry, running, sandbox)
            except (LaunchFailed, OSError, Refused) as error:
                what = error.reason.message if isinstance(error, Refused) else str(error)
                out_of_memory = self._tree.group(attempt_id).oom_kills() > 0
                event = endings.not_launched(entry.plan, what, out_of_memory=out_of_memory)
            if running.gate is not None:
                running.gate.admit_no_more(Refused("service_not_ready", "The engine ended."))
            if sandbox is not None and entry.plan.outputs:
                await self._keep_outputs(entry, sandbox)
            await self._finish(attempt_id, self._with_last_lines(entry, event), sandbox)

    async def _launch(self, entry: Entry, running: Running, log: AttemptLog) -> Sandbox:
        """A sandbox whose payload was started. Raises LaunchFailed, OSError, Refused."""
        group = self._tree.group(entry.attempt_id)
        image = self._images.get(entry.plan.runtime.image_digest)
        uid, gid = self._settings.account(entry.account_number)
        inputs = await self._inputs.verified(entry.plan, running.stop.is_set)
        if running.stop.is_set():
            raise LaunchFailed("the attempt was stopped before its sandbox was made.")
        group.create(entry.plan.limits)
        failpoint("executor.group_made")
        launch = Launch(
            attempt_id=entry.attempt_id,
            plan=entry.plan,
            image_root=self._images.root_of(image.image_digest),
            image_environment=image.environment,
            inputs=inputs,
            group=group,
            uid=uid,
            gid=gid,
            write_log=log.write,
        )
        making = asyncio.create_task(self._provider.make(launch))
        await _first(making, running.stop)
        while not making.done():  # stopped: what it is made of is taken away until it gives up
            await asyncio.to_thread(group.kill)
            await asyncio.wait({making}, timeout=GIVE_UP_SECONDS)
        sandbox = await making
        failpoint("executor.sandbox_made")
        try:
            await sandbox.check()
            if self._state(entry.attempt_id) is not State.STARTING:
                raise LaunchFailed("the attempt was stopped before its engine began.")
            await sandbox.start()
            failpoint("executor.payload_started")
        except BaseException:
            await asyncio.to_thread(group.kill)
            await sandbox.close()
            raise
        return sandbox

    def _began(self, entry: Entry, running: Running, sandbox: Sandbox) -> None:
        if self._state(entry.attempt_id) is not State.STARTING:
            return  # it is being stopped
        endpoint = entry.plan.endpoint
        if endpoint is not None:
            target = endpoint.path_or_port
            files = self._inputs.files(entry.plan)
            running.gate = Gate(entry.fence, endpoint, lambda: sandbox.connect(target), files)
        self._advance(entry.attempt_id, attempt.Run())
        failpoint("executor.running")

    async def _watch(self, entry: Entry, running: Running, sandbox: Sandbox) -> attempt.End:
        """Until the payload ended, by itself or because it was asked to."""
        exited = asyncio.create_task(sandbox.wait())
        await _first(exited, running.stop)
        if not exited.done():
            self._measure(entry.attempt_id)
            sandbox.terminate()
            await _first(exited, running.kill)
        group = self._tree.group(entry.attempt_id)
        await asyncio.to_thread(group.kill)
        return endings.of_exit(
            entry.plan,
            await exited,
            out_of_memory=group.oom_kills() > 0,
            process_limit_hits=group.process_limit_hits(),
            lapsed=self.leases.lapsed(entry.attempt_id),
        )

    def measure(self) -> None:
        """Take down how much memory each running attempt has needed so far."""
        for entry in self._ledger.holding():
            if entry.record.state is State.RUNNING:
                self._measure(entry.attempt_id)

    def _measure(self, attempt_id: str) -> None:
        self.peaks.sample(attempt_id, self._tree.group(attempt_id).processes())

    async def _keep_outputs(self, entry: Entry, sandbox: Sandbox) -> None:
        """Before the end is recorded: whoever hears of it finds them."""
        plan = entry.plan
        async with self._keeping:
            await asyncio.to_thread(
                self.outputs.collect,
                entry.attempt_id,
                plan.outputs,
                sandbox.open_output,
                plan.limits.storage_bytes,
            )

    def _with_last_lines(self, entry: Entry, event: attempt.End) -> attempt.End:
        """The reason of an end is shown to more people than a log, so a sensitive plan's has no words of it."""
        if event.outcome is Outcome.SUCCEEDED or entry.plan.sensitive:
            return event
        last = logs.last_lines(self._settings.logs_directory, entry.attempt_id)
        if not last:
            return event
        message = f"{event.reason.message} {LAST_WORDS}\n{last}"
        return replace(event, reason=Reason(event.reason.code, message))

    async def _finish(self, attempt_id: str, event: attempt.Event, sandbox: Sandbox | None) -> None:
        """Record the end, then remove everything and prove it, however long that takes."""
        failpoint("executor.end_observed")
        self._advance(attempt_id, event)
        failpoint("executor.end_recorded")
        await self._release(attempt_id, sandbox)

    async def _release(self, attempt_id: str, sandbox: Sandbox | None = None) -> None:
        await self._clean_up(attempt_id)
        failpoint("executor.cleaned_up")
        if sandbox is not None:
            await sandbox.close()
        await self.leases.give_back(attempt_id)
        failpoint("executor.lease_given_back")
        # After the watchdog let go of it, or a lapse meanwhile would leave its verdict for ever.
        guard.forget_verdict(self._settings.verdicts_directory, attempt_id)
        self._running.pop(attempt_id, None)
        self.peaks.forget(attempt_id)
        self._advance(attempt_id, attempt.CleanUp())
        failpoint("executor.released")
        size_of = partial(logs.size, self._settings.logs_directory)
        for old in self._ledger.forget_old(size_of):
            self._forget_words(old)

    def _forget_words(self, attempt_id: str) -> None:
        logs.remove(self._settings.logs_directory, attempt_id)
        self.outputs.remove(attempt_id)

    def last_line(self, fence: Fence) -> str:
        """The last words of an attempt, under the same rule. Blocking. Raises Refused."""
        entry = self.entry(fence)
        return "" if entry.plan.sensitive else logs.last_line(self._settings.logs_directory, entry.attempt_id)

    def discard(self, fence: Fence) -> None:
        """Nobody wants the log and the outputs of this attempt any more. Raises Refused."""
        if self.entry(fence).record.state is not State.RELEASED:
            raise Refused("attempt_not_released", "The attempt is not released yet.", retry_after_seconds=1)
        self._forget_words(fence.attempt_id)

    def read_output(self, fence: Fence, name: str, offset: int, limit: int) -> Piece:
        """A part of a file that the attempt left. Blocking. Raises Refused."""
        if self.entry(fence).record.outcome is None:
            raise Refused(
                "action_not_allowed",
                "The attempt has not ended; its outputs can be read once it has.",
                "name",
            )
        return self.outputs.read(fence.attempt_id, name, offset, limit)

    async def _clean_up(self, attempt_id: str) -> None:
        """Until nothing is left: what cannot be removed now is tried again, its reservation held, and after a while
        it is said."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not await asyncio.to_thread(self._remove_everything, attempt_id):
            if loop.time() - began >= QUARANTINE_SECONDS:
                self._quarantine(attempt_id)
            await asyncio.sleep(CLEANUP_RETRY_SECONDS)

    def _quarantine(self, attempt_id: str) -> None:
        entry = self._ledger.get(attempt_id)
        if entry is None or entry.record.state is not State.FINISHED:
            log.warning("%s, of no attempt that is known, cannot be removed", attempt_id)
            return
        group = self._tree.group(attempt_id)
        reason = endings.not_removed(group.processes(), group.directories)
        if entry.record.quarantine != reason:
            log.warning("attempt %s: %s", attempt_id, reason.message)
            self._advance(attempt_id, attempt.Quarantine(reason))

    def _remove_everything(self, attempt_id: str) -> bool:
        """Kill, remove, and whether nothing is left. Blocking; idempotent."""
        group = self._tree.group(attempt_id)
        return group.kill() and group.remove()

    # What an earlier run left.

    async def recover(self) -> None:
        """End and remove what an earlier run of this executor left, and say of each attempt how it ended."""
        self.outputs.sweep({entry.attempt_id for entry in self._ledger.entries()})
        verdicts = guard.verdicts(self._settings.verdicts_directory)
        left = self._tree.leftovers()
        seen_alive = {name for name in left if self._tree.group(name).processes()}
        for name in left:
            self._tree.group(name).sweep()
        seen_alive |= await self._provider.recover()
        held = self._ledger.holding()
        for entry in held:
            if entry.record.state is not State.FINISHED:
                verdict = verdicts.get(entry.attempt_id)
                alive = entry.attempt_id in seen_alive
                self._advance(entry.attempt_id, endings.left_behind(entry, verdict, seen_alive=alive))
                failpoint("executor.left_behind_recorded")
            self._spawn(self._release(entry.attempt_id))
        for name in {*left, *verdicts} - {entry.attempt_id for entry in held}:
            self._spawn(self._forget(name))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=RECOVER_SECONDS)

    async def _forget(self, name: str) -> None:
        """Remove what is of no attempt that is held."""
        await self._clean_up(name)
        guard.forget_verdict(self._settings.verdicts_directory, name)

    async def shutdown(self, grace_seconds: float) -> bool:
        """End every attempt in order and take no more; whether each was released in time."""
        self._closing = True
        for entry in self._ledger.holding():
            self._request_stop(entry, attempt.RequestStop(endings.SHUTDOWN), grace_seconds)
        until = asyncio.get_running_loop().time() + SHUTDOWN_SECONDS
        while self._tasks and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._tasks, timeout=left)
        return not self._tasks

    # The record.

    def _advance(self, attempt_id: str, event: attempt.Event) -> Entry:
        entry = self._ledger.get(attempt_id)
        assert entry is not None
        record = attempt.advance(entry.record, event)
        if record != entry.record:
            entry = self._ledger.record(attempt_id, record)
            self._on_change(entry)
        return entry

    def _state(self, attempt_id: str) -> State:
        entry = self._ledger.get(attempt_id)
        assert entry is not None
        return entry.record.state

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._settings.on_fault(task.exception())


async def _first(task: asyncio.Task[Any], event: asyncio.Event) -> None:
    """Until the task is done or the event is set."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
