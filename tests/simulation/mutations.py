"""Rules that are broken on purpose, each of which the simulation has to notice. What it never notices it does not
guard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ficc.controller.reconcilers.attempts import AttemptSteps
from ficc.controller.store import attempts as attempt_rows
from ficc.controller.store import nodes
from ficc.domain import attempt, lease, placement, restart, service, steps
from ficc.domain.attempt import Outcome, State
from ficc.domain.errors import Reason
from ficc.executor import acceptance, endings, ledger, watchdog
from ficc.executor import attempts as executor_attempts

Put = Callable[[Any, str, Any], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """`breaks` is given a function that replaces an attribute for as long as the mutation lasts."""

    name: str
    breaks: Callable[[Put], None]


@contextlib.contextmanager
def broken(mutation: Mutation) -> Iterator[None]:
    undo: list[Callable[[], None]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before = owner.__dict__[name]
        undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    mutation.breaks(put)
    try:
        yield
    finally:
        for back in reversed(undo):
            back()


def _resend_a_start(put: Put) -> None:
    """What got no answer is sent again."""
    real = steps.next_step

    def next_step(view: steps.View) -> steps.Step:
        said = view.reported
        lost = view.record.state is State.STARTING and said is not None and said.state is State.PREPARED
        again = lost and view.connected and view.wanted and not view.start_under_way
        return steps.SendStart() if again else real(view)

    async def start(self: Any, one: Any, step: Any, link: Any) -> None:
        self._begin(one, step, link.start(one.fence))

    first = AttemptSteps._start

    async def either(self: Any, one: Any, step: Any, link: Any) -> None:
        await (start if one.record.start_intended else first)(self, one, step, link)

    put(steps, "next_step", next_step)
    put(AttemptSteps, "_start", either)
    put(AttemptSteps, "_may_be_starting", lambda self, one: False)


def _believe_a_lease_over_too_early(put: Put) -> None:
    """The grantor waits for less than the holder, and gives the attempt up with its reservation."""
    put(lease, "over_for_grantor", lambda committed_ns, ttl_seconds: committed_ns + lease.SECOND)
    real = steps._finished

    def finished(view: steps.View) -> steps.Step:
        gone = not view.connected and view.lease_over
        return steps.Apply(attempt.CleanUp()) if gone else real(view)

    put(steps, "_finished", finished)


def _renew_under_the_same_sequence(put: Put) -> None:
    real = attempt_rows.renew_leases

    def renew(*args: Any, **named: Any) -> Any:
        return [(fence, 1) for fence, _ in real(*args, **named)]

    put(attempt_rows, "renew_leases", renew)


def _release_without_cleaning_up(put: Put) -> None:
    """Whoever was asked to end is taken for ended."""

    async def watch(self: Any, entry: Any, running: Any, sandbox: Any) -> attempt.End:
        exited = asyncio.create_task(sandbox.wait())
        await executor_attempts._first(exited, running.stop)
        sandbox.terminate()
        return attempt.End(Outcome.FAILED, Reason("engine_exited", "It ended."))

    put(executor_attempts.Attempts, "_watch", watch)
    put(executor_attempts.Attempts, "_remove_everything", lambda self, attempt_id: True)


def _start_before_the_intent_is_durable(put: Put) -> None:
    real = ledger.Ledger._write_record

    def write(self: Any, entry: Any) -> bool:
        return True if entry.record.state is State.STARTING else bool(real(self, entry))

    put(ledger.Ledger, "_write_record", write)


def _guess_an_end_that_nobody_saw(put: Put) -> None:
    def left_behind(entry: Any, verdict: Any, *, seen_alive: bool) -> attempt.Event:
        return attempt.End(Outcome.FAILED, Reason("executor_restarted", "It must have ended."))

    put(endings, "left_behind", left_behind)


def _forget_to_kill_at_the_deadline(put: Put) -> None:
    """Neither the executor nor its watchdog looks at the clock."""
    put(executor_attempts.Attempts, "_lapsed", lambda self, attempt_id: None)
    real = watchdog.Watchdog._end

    def end(self: Any, attempt_id: str, armed: Any, why: str, now_ns: int) -> None:
        if why == "lease_lapsed":
            armed.due_ns = now_ns + lease.SECOND
        else:
            real(self, attempt_id, armed, why, now_ns)

    put(watchdog.Watchdog, "_end", end)


def _hold_what_was_not_mentioned_to_be_gone(put: Put) -> None:
    """L8: another controller may have admitted it a moment ago."""
    real = steps.next_step
    put(steps, "next_step", lambda view: real(replace(view, denied=True)))


def _stop_a_start_of_another_controller(put: Put) -> None:
    put(AttemptSteps, "_may_be_starting", lambda self, one: False)


def _follow_older_news(put: Put) -> None:
    put(attempt, "later", lambda one, other: other)


def _start_after_unknown(put: Put) -> None:
    real = service.check_start

    def check(record: Any, replicas: Any, *, acknowledge_unknown: bool) -> None:
        real(record, replicas, acknowledge_unknown=True)

    put(service, "check_start", check)


def _retry_unknown(put: Put) -> None:
    real = restart.decide

    def decide(policy: Any, past: Any, **named: Any) -> Any:
        past = [
            replace(one, outcome=Outcome.FAILED) if one.outcome is Outcome.UNKNOWN else one for one in past
        ]
        return real(policy, past, **named)

    put(restart, "decide", decide)


def _admit_without_room(put: Put) -> None:
    """Neither side looks at what is reserved."""
    put(nodes, "reserved", lambda connection, node_ids: dict.fromkeys(node_ids, placement.NOTHING))
    put(acceptance, "check_room", lambda *_: None)


MUTATIONS = tuple(
    Mutation(breaks.__name__.strip("_"), breaks)
    for breaks in (
        _resend_a_start,
        _believe_a_lease_over_too_early,
        _renew_under_the_same_sequence,
        _release_without_cleaning_up,
        _start_before_the_intent_is_durable,
        _guess_an_end_that_nobody_saw,
        _forget_to_kill_at_the_deadline,
        _hold_what_was_not_mentioned_to_be_gone,
        _stop_a_start_of_another_controller,
        _follow_older_news,
        _start_after_unknown,
        _retry_unknown,
        _admit_without_room,
    )
)
