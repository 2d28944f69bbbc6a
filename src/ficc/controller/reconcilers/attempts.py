"""Attempts: decide the next step of each from what its executor reports, and take it.

Decisions are `ficc.domain.steps`; here they are carried out. A row is written only if it still is as it was
read; whoever lost such a race looks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ficc.controller.operations.beliefs import Beliefs
from ficc.controller.operations.context import Context
from ficc.controller.operations.ports import NodeLink, Nodes
from ficc.controller.operations.progress import Progress
from ficc.controller.reconcilers.deadlines import Deadlines
from ficc.controller.reconcilers.liveness import death
from ficc.controller.reconcilers.readiness import ReadinessFailed, answers, hand_over
from ficc.controller.store import attempts as rows
from ficc.controller.store import services
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.domain import attempt, lease, steps
from ficc.domain.attempt import Outcome, State
from ficc.domain.errors import Reason, Refused
from ficc.failpoints import failpoint

LISTEN_SECONDS = 1.0
"""Between two questions what an engine that loads says."""
RETRY_SECONDS = 1.0
"""Between a call that was refused and the next look."""
START_SECONDS = 5.0
"""How long the intent to start an attempt is seen without its start before that is held to be lost."""
READ_BYTES_PER_SECOND_MIN = 20 << 20
"""What the slowest disk reads on which an attempt is given the time to be prepared."""
UNREADABLE = frozenset({"model_not_ready", "source_mismatch"})
"""Reasons of an executor for not launching: an input is not there, or not what its name says."""

log = logging.getLogger("ficc.controller")


@dataclass(frozen=True, slots=True)
class Ending:
    """What an attempt is ended for: `unwanted` once it is not wanted, `overdue` at once, and then it has failed."""

    unwanted: Reason = steps.STOPPED
    overdue: Reason | None = None


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A call or a probe of one attempt that has not come to an end."""

    step: steps.Step
    task: asyncio.Task[None]


class AttemptSteps:
    """`examine` is given digests of blobs that an executor could not use as they are; `wake` is called when
    a call or a probe came to its end."""

    def __init__(
        self,
        context: Context,
        nodes: Nodes,
        examine: Callable[[set[str]], Coroutine[Any, Any, None]],
        wake: Callable[[], None],
        progress: Progress,
    ) -> None:
        self._context = context
        self._nodes = nodes
        self._examine = examine
        self._wake = wake
        self._examining: set[asyncio.Task[None]] = set()
        self._busy: dict[str, UnderWay] = {}
        self._denied: dict[str, NodeLink] = {}
        """By attempt: the link on which its executor said that it knows no such attempt."""
        self._intents: dict[str, float] = {}
        """By attempt: when its intent to start was first seen here, on the event loop's clock."""
        self._progress = progress
        self._deadlines = Deadlines(context)
        self.beliefs = Beliefs(context)

    def close(self) -> None:
        for task in (*self._examining, *(under_way.task for under_way in self._busy.values())):
            task.cancel()

    def forget_all_but(self, held: Collection[str]) -> None:
        """Keep in memory only what concerns these attempts."""
        self._denied = {one: link for one, link in self._denied.items() if one in held}
        self._intents = {one: seen for one, seen in self._intents.items() if one in held}
        self.beliefs.forget_all_but(held)
        self._deadlines.forget_all_but(held)
        self._progress.forget_all_but(held)

    async def take(self, one: Attempt, *, wanted: bool, why: Ending | None = None) -> None:
        """The next step of an attempt that is, or is not, to go on; `why` says what it is ended for."""
        link = self._nodes.link(one.node_id)
        step = steps.next_step(self._view(one, link, wanted=wanted, why=why or Ending()))
        match step:
            case steps.Follow(record):
                await self._record(one, record)
            case steps.Apply(event):
                record = attempt.advance(one.record, event)
                await self._record(one, record)
            case steps.Wait():
                pass
            case _ if self._holds_up(one, step):
                pass  # what is under way comes to an end first
            case steps.Ask():
                assert link is not None
                self._begin(one, step, self._ask(one, link))
            case steps.SendAdmit():
                assert link is not None
                self._begin(one, step, self._admit(one, link))
            case steps.SendStart():
                assert link is not None
                await self._start(one, step, link)
            case steps.SendStop(reason, outcome):
                assert link is not None
                failpoint("controller.stop_decided")
                grace = self._context.settings.lifecycle.stop_grace_seconds
                self._begin(one, step, link.stop(one.fence, reason, outcome, grace))
            case steps.Probe():
                assert link is not None
                self._begin(one, step, self._probe(one, link))
            case steps.Watch() if one.readiness is not None:
                assert link is not None
                self._begin(one, step, self._watch(one, link))
            case steps.Watch():
                pass  # a job ends by itself, or by its deadline

    def _holds_up(self, one: Attempt, step: steps.Step) -> bool:
        """Whether something under way goes first. A stop overtakes all but another stop, and everything overtakes
        the watch over an engine."""
        under_way = self._busy.get(one.id)
        if under_way is None:
            return False
        if isinstance(under_way.step, steps.Watch):
            return isinstance(step, steps.Watch)
        return not isinstance(step, steps.SendStop) or isinstance(under_way.step, steps.SendStop)

    def _view(self, one: Attempt, link: NodeLink | None, *, wanted: bool, why: Ending) -> steps.View:
        under_way = self._busy.get(one.id)
        step = None if under_way is None else under_way.step
        return steps.View(
            record=one.record,
            wanted=wanted,
            ready=one.ready_at is not None or one.readiness is None,
            connected=link is not None,
            reported=None if link is None else link.reported(one.id),
            leased=one.belief is not None,
            lease_over=self.beliefs.is_over(one),
            start_under_way=isinstance(step, steps.SendStart) or self._may_be_starting(one),
            denied=link is not None and self._denied.get(one.id) is link,
            admit_under_way=isinstance(step, steps.SendAdmit),
            overdue=why.overdue or self._overdue(one),
            unwanted=why.unwanted,
        )

    def _overdue(self, one: Attempt) -> Reason | None:
        runs = one.record.state is State.RUNNING
        seconds = self._context.settings.lifecycle.ready_seconds if runs else self._prepare_seconds(one)
        if one.ready or not self._deadlines.passed(one.id, one.deadline_at, seconds):
            return None
        if runs:
            return Reason("ready_timeout", f"The engine did not answer within {seconds:.0f} s of its start.")
        return Reason("prepare_timeout", f"The engine was not started within {seconds:.0f} s.")

    def _prepare_seconds(self, one: Attempt) -> float:
        """An executor reads every byte of a new model before it launches anything with it."""
        count = sum(int(entry["bytes"]) for entry in one.plan.get("inputs", ()))
        return self._context.settings.lifecycle.prepare_seconds + count / READ_BYTES_PER_SECOND_MIN

    def _may_be_starting(self, one: Attempt) -> bool:
        """Whether the start may still be on its way from another controller, or from this one before it was
        restarted."""
        if one.record.state is not State.STARTING:
            return False
        now = asyncio.get_running_loop().time()
        return now - self._intents.setdefault(one.id, now) < START_SECONDS

    async def _record(self, one: Attempt, record: attempt.Record) -> None:
        """Write another record; an engine that was just seen gets its time to become ready."""
        now, deadline_at = self._context.now(), one.deadline_at
        if record.state is State.RUNNING and one.record.state is not State.RUNNING:
            ready_seconds = self._context.settings.lifecycle.ready_seconds
            deadline_at = None if one.readiness is None else now + ready_seconds
        after = rows.changed_to(one, record, now, deadline_at=deadline_at)
        written = await self._context.database.write(lambda tx: rows.put(tx, one, after))
        failpoint("controller.record_followed")
        reason = record.reason
        if written and reason is not None and reason.code in UNREADABLE and reason != one.record.reason:
            self._look_into(one)
        if written and after.released:
            failpoint("controller.release_recorded")
            link = self._nodes.link(one.node_id)
            if link is not None:
                link.forget(one.id)

    def _look_into(self, one: Attempt) -> None:
        """What its executor refuses to launch with is no longer shown as verified, if it is not."""
        digests = {entry["sha256"] for entry in one.plan.get("inputs", ())}
        task = asyncio.create_task(self._run(one, self._examine(digests)))
        self._examining.add(task)
        task.add_done_callback(self._examining.discard)

    # Calls, each in a task of its own: a silent node holds up nobody else.

    def _begin(self, one: Attempt, step: steps.Step, work: Coroutine[Any, Any, None]) -> None:
        earlier = self._busy.get(one.id)
        if earlier is not None:
            earlier.task.cancel()
        task = asyncio.create_task(self._run(one, work))
        self._busy[one.id] = UnderWay(step, task)
        task.add_done_callback(lambda done: self._ended(one.id, done))

    def _ended(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        under_way = self._busy.get(attempt_id)
        if under_way is not None and under_way.task is task:
            del self._busy[attempt_id]
        self._wake()

    async def _run(self, one: Attempt, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Refused as refused:
            log.warning("attempt %s: %s", one.id, refused)
            await asyncio.sleep(RETRY_SECONDS)  # nothing is asked again at once

    async def _ask(self, one: Attempt, link: NodeLink) -> None:
        await link.learn(one.id)
        if link.reported(one.id) is None:
            self._denied[one.id] = link

    async def _admit(self, one: Attempt, link: NodeLink) -> None:
        """The first lease is recorded before it is sent, so that it is never forgotten."""
        boot_id, sent_ns = link.lease_clock()
        sequence = one.lease_sequence + 1
        now, ttl = self._context.now(), self._context.settings.leases.ttl_seconds
        leased = replace(
            one,
            boot_id=boot_id,
            lease_sequence=sequence,
            belief=self._context.believe(ttl),
            deadline_at=one.deadline_at or now + self._prepare_seconds(one),
        )
        if not await self._context.database.write(lambda tx: rows.put(tx, one, leased)):
            return
        failpoint("controller.admit_recorded")
        try:
            await link.admit(one.fence, one.plan, lease.Renew(sequence, boot_id, sent_ns, ttl))
            failpoint("controller.admit_answered")
        except Refused as refused:
            if refused.code == "executor_unavailable":
                raise
            record = attempt.advance(leased.record, attempt.Reject(refused.reason))
            await self._record(leased, record)

    async def _start(self, one: Attempt, step: steps.Step, link: NodeLink) -> None:
        """The intent first, durably; then the message, once."""
        record = attempt.advance(one.record, attempt.IntendStart())
        after = rows.changed_to(one, record, self._context.now())
        if await self._context.database.write(lambda tx: rows.put(tx, one, after)):
            failpoint("controller.start_intended")
            self._begin(after, step, link.start(one.fence))
            failpoint("controller.start_sent")

    async def _probe(self, one: Attempt, link: NodeLink) -> None:
        """Until the engine gives a real answer; what it says meanwhile is its progress."""
        assert one.readiness is not None
        upload = one.readiness.get("upload")
        listening: asyncio.Task[None] | None = None
        try:
            if upload is not None:
                tell = partial(self._progress.note, one.id)
                await hand_over(link, one.fence, upload["model"], upload["input_ids"], tell)
            listening = asyncio.create_task(self._listen(one, link))
            await answers(link, one.fence, one.readiness["path"], one.readiness["body"])
        except ReadinessFailed as failed:
            grace = self._context.settings.lifecycle.stop_grace_seconds
            await link.stop(one.fence, Reason("readiness_failed", str(failed)), Outcome.FAILED, grace)
            return
        finally:
            if listening is not None:
                listening.cancel()
        await self._context.database.write(lambda tx: self._mark_ready(tx, one.id))
        failpoint("controller.ready_recorded")

    async def _listen(self, one: Attempt, link: NodeLink) -> None:
        with suppress(Refused):
            while True:
                self._progress.note(one.id, await link.last_line(one.fence))
                await asyncio.sleep(LISTEN_SECONDS)

    async def _watch(self, one: Attempt, link: NodeLink) -> None:
        """Until the engine, which was ready, is found dead; then the attempt has failed."""
        assert one.readiness is not None
        lifecycle = self._context.settings.lifecycle
        deadline = await self._context.database.read(
            partial(services.deadline_seconds, service_id=one.service_id)
        )
        reason = await death(link, one.fence, one.readiness, lifecycle.liveness_seconds, deadline)
        if reason is not None:
            await link.stop(one.fence, reason, Outcome.FAILED, lifecycle.stop_grace_seconds)

    def _mark_ready(self, tx: Transaction, attempt_id: str) -> None:
        found = rows.get(tx.connection, attempt_id)
        if found is not None and found.record.state is State.RUNNING:
            now = self._context.now()
            rows.put(tx, found, replace(found, ready_at=now, since_at=now, deadline_at=None))
