"""Attempts: decide the next step of each from what its executor reports, and take it.

Decisions are `ficc.domain.steps`; here they are carried out. A row is written only if it still is as it was
read; whoever lost such a race looks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from ficc.controller.operations.context import Context
from ficc.controller.operations.ports import NodeLink, Nodes
from ficc.controller.reconcilers.readiness import ReadinessFailed, answers
from ficc.controller.store import attempts as rows
from ficc.controller.store.attempts import Attempt
from ficc.controller.store.database import Transaction
from ficc.domain import attempt, lease, steps
from ficc.domain.attempt import Outcome, State
from ficc.domain.errors import Reason, Refused

RETRY_SECONDS = 1.0
"""Between a call that was refused and the next look."""
READ_BYTES_PER_SECOND_MIN = 20 << 20
"""What the slowest disk reads on which an attempt is given the time to be prepared."""
UNREADABLE = frozenset({"model_not_ready", "source_mismatch"})
"""Reasons of an executor for not launching: an input is not there, or not what its name says."""

log = logging.getLogger("ficc.controller")


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
    ) -> None:
        self._context = context
        self._nodes = nodes
        self._examine = examine
        self._wake = wake
        self._examining: set[asyncio.Task[None]] = set()
        self._busy: dict[str, UnderWay] = {}
        self._seen: dict[str, tuple[int, int]] = {}
        """By attempt: the newest lease sequence that was read, and when it was first, CLOCK_BOOTTIME ns."""

    def close(self) -> None:
        for task in (*self._examining, *(under_way.task for under_way in self._busy.values())):
            task.cancel()

    def forget_all_but(self, held: Collection[str]) -> None:
        """Keep in memory only what concerns these attempts."""
        self._seen = {attempt_id: seen for attempt_id, seen in self._seen.items() if attempt_id in held}

    async def take(self, one: Attempt, *, wanted: bool) -> None:
        """The next step of an attempt that is, or is not, to go on."""
        link = self._nodes.link(one.node_id)
        step = steps.next_step(self._view(one, link, wanted=wanted))
        match step:
            case steps.Follow(record):
                await self._record(one, record)
            case steps.Apply(event):
                record, _ = attempt.advance(one.record, event)
                await self._record(one, record)
            case steps.Wait():
                pass
            case _ if self._holds_up(one, step):
                pass  # what is under way comes to an end first
            case steps.SendAdmit():
                assert link is not None
                self._begin(one, step, self._admit(one, link))
            case steps.SendStart():
                assert link is not None
                await self._start(one, step, link)
            case steps.SendStop(reason, outcome):
                assert link is not None
                grace = self._context.settings.lifecycle.stop_grace_seconds
                self._begin(one, step, link.stop(one.fence, reason, outcome, grace))
            case steps.Probe():
                assert link is not None
                self._begin(one, step, self._probe(one, link))

    def _holds_up(self, one: Attempt, step: steps.Step) -> bool:
        """Whether something under way goes first. A stop overtakes all but another stop."""
        under_way = self._busy.get(one.id)
        if under_way is None:
            return False
        return not isinstance(step, steps.SendStop) or isinstance(under_way.step, steps.SendStop)

    def _view(self, one: Attempt, link: NodeLink | None, *, wanted: bool) -> steps.View:
        now, under_way = self._context.now(), self._busy.get(one.id)
        step = None if under_way is None else under_way.step
        return steps.View(
            record=one.record,
            wanted=wanted,
            ready=one.ready_at is not None,
            connected=link is not None,
            reported=None if link is None else link.reported(one.id),
            leased=one.belief is not None,
            lease_over=one.belief is not None and self._believed_over(one, one.belief),
            start_under_way=isinstance(step, steps.SendStart),
            admit_under_way=isinstance(step, steps.SendAdmit),
            overdue=self._overdue(one, now),
        )

    def _believed_over(self, one: Attempt, belief: lease.Belief) -> bool:
        boot_id, now_ns = self._context.lease_clock()
        if self._seen.get(one.id, (0, 0))[0] != one.lease_sequence:
            self._seen[one.id] = one.lease_sequence, now_ns
        return lease.believed_over(belief, boot_id, now_ns, self._seen[one.id][1])

    def _overdue(self, one: Attempt, now: float) -> Reason | None:
        if one.deadline_at is None or now < one.deadline_at or one.ready:
            return None
        lifecycle = self._context.settings.lifecycle
        if one.record.state is State.RUNNING:
            return Reason(
                "ready_timeout",
                f"The engine did not answer within {lifecycle.ready_seconds:.0f} s of its start.",
            )
        return Reason(
            "prepare_timeout", f"The engine was not started within {self._prepare_seconds(one):.0f} s."
        )

    def _prepare_seconds(self, one: Attempt) -> float:
        """An executor reads every byte of a new model before it launches anything with it."""
        count = sum(int(entry["bytes"]) for entry in one.plan.get("inputs", ()))
        return self._context.settings.lifecycle.prepare_seconds + count / READ_BYTES_PER_SECOND_MIN

    async def _record(self, one: Attempt, record: attempt.Record) -> None:
        """Write another record; a process that was just seen gets its time to become ready."""
        now, deadline_at = self._context.now(), one.deadline_at
        if record.state is State.RUNNING and one.record.state is not State.RUNNING:
            deadline_at = now + self._context.settings.lifecycle.ready_seconds
        after = rows.changed_to(one, record, now, deadline_at=deadline_at)
        written = await self._context.database.write(lambda tx: rows.put(tx, one, after))
        reason = record.reason
        if written and reason is not None and reason.code in UNREADABLE and reason != one.record.reason:
            self._look_into(one)
        if written and after.released:
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
        try:
            await link.admit(one.fence, one.plan, lease.Renew(sequence, boot_id, sent_ns, ttl))
        except Refused as refused:
            if refused.code == "executor_unavailable":
                raise
            record, _ = attempt.advance(leased.record, attempt.Reject(refused.reason))
            await self._record(leased, record)

    async def _start(self, one: Attempt, step: steps.Step, link: NodeLink) -> None:
        """The intent first, durably; then the message, once."""
        record, _ = attempt.advance(one.record, attempt.IntendStart())
        after = rows.changed_to(one, record, self._context.now())
        if await self._context.database.write(lambda tx: rows.put(tx, one, after)):
            self._begin(after, step, link.start(one.fence))

    async def _probe(self, one: Attempt, link: NodeLink) -> None:
        """Until the engine gives a real answer."""
        assert one.readiness is not None
        try:
            await answers(link, one.fence, one.readiness["path"], one.readiness["body"])
        except ReadinessFailed as failed:
            grace = self._context.settings.lifecycle.stop_grace_seconds
            await link.stop(one.fence, Reason("readiness_failed", str(failed)), Outcome.FAILED, grace)
            return
        await self._context.database.write(lambda tx: self._mark_ready(tx, one.id))

    def _mark_ready(self, tx: Transaction, attempt_id: str) -> None:
        found = rows.get(tx.connection, attempt_id)
        if found is not None and found.record.state is State.RUNNING:
            now = self._context.now()
            rows.put(tx, found, replace(found, ready_at=now, since_at=now, deadline_at=None))
