"""What a controller does next about one attempt: a decision from what it wants, what it recorded and what
the attempt's executor says now.

The executor's word is the truth and the record follows it, forward only: another controller may have heard
more. What is never inferred: that a start which got no answer did not happen, that an attempt whose node is
silent has ended before its lease is over, and that an executor knows nothing of an attempt that it was not
asked about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ficc.domain import attempt
from ficc.domain.attempt import Outcome, State
from ficc.domain.errors import Reason

STOPPED = Reason("service_stopped", "The service was stopped.")
LEASE_OVER = Reason("lease_over", "The node has not answered since before its lease ended.")
START_NOT_CONFIRMED = Reason(
    "start_not_confirmed", "The answer to the start was lost and it had not happened."
)
GONE = Reason("attempt_unknown", "The executor knows nothing of the attempt any more.")


@dataclass(frozen=True, slots=True)
class View:
    """`reported` is the executor's record, None when it says that it knows no such attempt; it counts only
    while `connected`. `leased`: a first lease was sent at some time. `overdue` says why a state has lasted
    past its limit. `start_under_way` and `admit_under_way`: the call was made and has not ended."""

    record: attempt.Record
    wanted: bool
    ready: bool
    connected: bool
    reported: attempt.Record | None
    leased: bool
    lease_over: bool
    start_under_way: bool
    overdue: Reason | None
    admit_under_way: bool = False
    denied: bool = False
    """The executor was asked after the attempt was admitted, and says that it knows no such attempt."""
    unwanted: Reason = STOPPED
    """Why the attempt is to end, once it is not wanted."""


@dataclass(frozen=True, slots=True)
class Wait:
    pass


@dataclass(frozen=True, slots=True)
class Follow:
    """Record what the executor says."""

    record: attempt.Record


@dataclass(frozen=True, slots=True)
class Apply:
    """Record an event that the controller itself observed."""

    event: attempt.Event


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the executor about an attempt that it has not mentioned."""


@dataclass(frozen=True, slots=True)
class SendAdmit:
    pass


@dataclass(frozen=True, slots=True)
class SendStart:
    """Record the intent, then send: once."""


@dataclass(frozen=True, slots=True)
class SendStop:
    reason: Reason
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the engine for a real answer."""


@dataclass(frozen=True, slots=True)
class Watch:
    """See that the engine, which was ready, goes on answering."""


Step = Wait | Follow | Apply | Ask | SendAdmit | SendStart | SendStop | Probe | Watch


def next_step(view: View) -> Step:
    record = view.record
    if record.state is State.RELEASED:
        return Wait()
    if record.state is State.FINISHED:
        return _finished(view)
    if record.state is State.PLANNED:
        return _planned(view)
    if not view.connected:
        return Apply(attempt.LoseTrack(LEASE_OVER)) if view.lease_over else Wait()
    if view.reported is None:
        return Apply(attempt.LoseTrack(GONE)) if view.denied else Ask()
    if _ahead(record, view.reported):
        return _start_in_question(view)
    if view.reported != record:
        return Follow(view.reported) if attempt.later(record, view.reported) is view.reported else Wait()
    return _act(view)


def _finished(view: View) -> Step:
    """Capacity comes back by the executor's word, or because it never had the attempt."""
    if view.connected and view.reported is not None:
        if view.reported.state in attempt.LIVE:
            stopping = view.reported.state is State.STOPPING
            return Wait() if stopping else SendStop(LEASE_OVER, Outcome.CANCELLED)
        said = _without_another_outcome(view.record, view.reported)
        return Follow(said) if attempt.later(view.record, said) is said and said != view.record else Wait()
    if not view.leased or (view.connected and view.denied):
        return Apply(attempt.CleanUp())
    return Ask() if view.connected else Wait()


def _without_another_outcome(record: attempt.Record, reported: attempt.Record) -> attempt.Record:
    """What nobody could know is known once the executor says it; any other outcome stays as it was recorded. It
    differs where an admission arrived after its attempt had been given up, and lapsed at once."""
    if record.outcome is Outcome.UNKNOWN:
        return reported
    return replace(reported, outcome=record.outcome, reason=record.reason)


def _planned(view: View) -> Step:
    """An admission that was sent and not answered may still arrive while its lease lasts, and nothing is
    concluded about one that is under way: the executor would hold what this side gave up."""
    if view.connected and view.reported is not None:
        return Follow(view.reported)
    if view.admit_under_way:
        return Wait()
    if view.connected and view.wanted and view.overdue is None:
        return SendAdmit()
    if view.connected or not view.leased or view.lease_over:
        if not view.wanted:
            return Apply(attempt.End(Outcome.CANCELLED, view.unwanted))
        if view.overdue is not None:
            return Apply(attempt.End(Outcome.FAILED, view.overdue))
    return Wait()


def _ahead(record: attempt.Record, reported: attempt.Record) -> bool:
    """Whether this side knows of a start intent that the executor has not heard of."""
    return record.start_intended and not reported.start_intended and reported.state in attempt.LIVE


def _start_in_question(view: View) -> Step:
    """Looked up, and it has not happened. It may still be on its way, so the attempt is ended, not
    started again; the executor takes a start only from an attempt that is prepared."""
    if view.start_under_way:
        return Wait()
    if view.reported is not None and view.reported.state is State.STOPPING:
        return Wait()
    return SendStop(START_NOT_CONFIRMED, Outcome.CANCELLED)


def _act(view: View) -> Step:
    record = view.record
    if record.state not in attempt.LIVE or record.state is State.STOPPING:
        return Wait()
    if not view.wanted:
        return SendStop(view.unwanted, Outcome.CANCELLED)
    if view.overdue is not None:
        return SendStop(view.overdue, Outcome.FAILED)
    if record.state is State.PREPARED:
        return SendStart()
    if record.state is State.RUNNING:
        return Watch() if view.ready else Probe()
    return Wait()
