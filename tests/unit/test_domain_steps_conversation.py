"""The steps as a conversation: a controller's mirror and an executor's ledger, both on the same table, when
messages are lost, late or doubled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ficc.domain import attempt
from ficc.domain.attempt import LIVE, Outcome, Record, State
from ficc.domain.errors import Reason
from ficc.domain.steps import Apply, Ask, Follow, Probe, SendAdmit, SendStart, SendStop, Step, View, next_step

WHY = Reason("engine_exited", "The engine exited with status 1.")
LATE = Reason("prepare_timeout", "The engine was not started in time.")
LAPSED = Reason("lease_lapsed", "The lease was not renewed in time.")


class Ledger:
    """An executor's side: what it admitted, and how it answers. Nothing here is told twice."""

    def __init__(self) -> None:
        self.record: Record | None = None
        self.launches = 0

    def advance(self, event: attempt.Event) -> None:
        assert self.record is not None
        self.record = attempt.advance(self.record, event)
        self.launches += isinstance(event, attempt.IntendStart)

    def take(self, message: object) -> None:
        if isinstance(message, SendAdmit):
            if self.record is None:
                self.record = attempt.advance(Record(), attempt.Admit())
        elif self.record is None:
            pass  # refused: it knows no such attempt
        elif isinstance(message, SendStart):
            if self.record.state is State.PREPARED:
                self.advance(attempt.IntendStart())
        elif isinstance(message, SendStop) and self.record.state in LIVE:
            self.advance(attempt.RequestStop(message.reason, message.outcome))

    def work(self, fails: bool) -> None:
        """The next thing that the attempt's runner does by itself."""
        if self.record is None:
            return
        failure = attempt.End(Outcome.FAILED, WHY)
        event: attempt.Event | None = {
            State.ADMITTED: attempt.BeginStaging(),
            State.STAGING: failure if fails else attempt.Prepare(),
            State.STARTING: failure if fails else attempt.Run(),
            State.RUNNING: failure if fails else None,
            State.STOPPING: attempt.End(Outcome.CANCELLED, WHY),
            State.FINISHED: attempt.CleanUp(),
        }.get(self.record.state)
        if event is not None:
            self.advance(event)

    def end_of_lease(self) -> None:
        if self.record is not None and self.record.state in LIVE:
            self.advance(attempt.RequestStop(LAPSED, Outcome.FAILED))
            self.work(fails=False)

    def restart(self, observed: bool) -> None:
        """An executor that comes back ends and removes what it finds, before it speaks to anyone."""
        if self.record is None or self.record.state is State.RELEASED:
            return
        if self.record.state in LIVE:
            known = observed or not self.record.start_intended
            self.advance(attempt.End(Outcome.FAILED, WHY) if known else attempt.LoseTrack(WHY))
        self.work(fails=False)


class Mirror:
    """A controller's side, as the reconciler carries the steps out."""

    def __init__(self) -> None:
        self.record = Record()
        self.wanted = True
        self.ready = False
        self.leased = False
        self.lease_over = False
        self.overdue: Reason | None = None
        self.connected = False
        self.reported: Record | None = None
        self.under_way: Step | None = None
        self.denied = False

    def view(self) -> View:
        return View(
            record=self.record,
            wanted=self.wanted,
            ready=self.ready,
            connected=self.connected,
            reported=self.reported,
            leased=self.leased,
            lease_over=self.lease_over,
            start_under_way=isinstance(self.under_way, SendStart),
            overdue=self.overdue,
            admit_under_way=isinstance(self.under_way, SendAdmit),
            denied=self.denied,
        )

    def step(self) -> Step | None:
        """Take the next step; what is to be sent, if anything."""
        step = next_step(self.view())
        match step:
            case Follow(record):
                self.record = record
            case Apply(event):
                self.record = attempt.advance(self.record, event)
            case Probe():
                self.ready = True
            case Ask() | SendAdmit() | SendStart() | SendStop() if self.may_call(step):
                self.leased = True
                if isinstance(step, SendStart):
                    self.record = attempt.advance(self.record, attempt.IntendStart())
                self.under_way = step
                return step
        return None

    def may_call(self, step: Step) -> bool:
        """One call at a time; a stop overtakes all but another stop."""
        if self.under_way is None:
            return True
        return isinstance(step, SendStop) and not isinstance(self.under_way, SendStop)


class Conversation:
    """A controller and an executor over connections that break: what was sent on one is lost, or arrives long
    after, once or more. The executor tells every change of its record, in order, while the connection lasts.
    An action that has nothing to act on does nothing."""

    def __init__(self) -> None:
        self.ledger, self.mirror = Ledger(), Mirror()
        self.calls: deque[Step] = deque()
        self.reports: deque[tuple[Record | None, bool]] = deque()
        self.strays: deque[Step] = deque()

    # The connection.

    def connect(self) -> None:
        if not self.mirror.connected:
            self.mirror.connected = True
            self.mirror.lease_over = False
            self.mirror.reported = self.ledger.record

    def disconnect(self) -> None:
        self.strays.extend(call for call in self.calls if not isinstance(call, SendAdmit))
        self.calls.clear()
        self.reports.clear()
        self.mirror.connected, self.mirror.reported, self.mirror.under_way = False, None, None
        self.mirror.denied = False

    def deliver_call(self) -> None:
        if self.calls:
            self.ledger.take(self.calls.popleft())
            self.reports.append((self.ledger.record, True))

    def deliver_report(self) -> None:
        if self.reports:
            self.mirror.reported, answers = self.reports.popleft()
            if answers:
                asked, self.mirror.under_way = self.mirror.under_way, None
                self.mirror.denied = isinstance(asked, Ask) and self.mirror.reported is None

    def give_up_waiting(self) -> None:
        """The call's time ran out; it may still be carried out. (An admission is asked for until answered.)"""
        if not isinstance(self.mirror.under_way, SendAdmit):
            self.mirror.under_way = None

    def deliver_stray(self) -> None:
        if self.strays:
            self.ledger.take(self.strays.popleft())
            self.tell()

    def double_stray(self) -> None:
        if self.strays:
            self.strays.append(self.strays[0])
            self.deliver_stray()

    def tell(self) -> None:
        if self.mirror.connected:
            self.reports.append((self.ledger.record, False))

    # Either side.

    def reconcile(self) -> None:
        call = self.mirror.step()
        if call is not None:
            self.calls.append(call)

    def work(self) -> None:
        self.ledger.work(fails=False)
        self.tell()

    def fail(self) -> None:
        self.ledger.work(fails=True)
        self.tell()

    def restart_and_see(self) -> None:
        self.disconnect()
        self.ledger.restart(observed=True)

    def restart_blindly(self) -> None:
        self.disconnect()
        self.ledger.restart(observed=False)

    def let_the_lease_run_out(self) -> None:
        """The holder is done before the grantor believes it."""
        if not self.mirror.connected:
            self.ledger.end_of_lease()
            self.mirror.lease_over = self.mirror.leased

    def stop_service(self) -> None:
        self.mirror.wanted = False

    def run_late(self) -> None:
        self.mirror.overdue = LATE

    def go_on(self) -> None:
        """Undisturbed: everything arrives, and each side does its next thing."""
        while self.calls:
            self.deliver_call()
        while self.reports:
            self.deliver_report()
        self.reconcile()
        self.work()

    def come_to_an_end(self) -> None:
        """A connection that holds, and an operator who wants no more."""
        self.stop_service()
        self.connect()
        for _ in range(20):
            self.go_on()


OFTEN = [Conversation.reconcile, Conversation.deliver_call, Conversation.deliver_report, Conversation.work]
NOW_AND_THEN = [Conversation.go_on, Conversation.connect, Conversation.deliver_stray]
RARELY = [
    Conversation.disconnect,
    Conversation.give_up_waiting,
    Conversation.double_stray,
    Conversation.fail,
    Conversation.restart_and_see,
    Conversation.restart_blindly,
    Conversation.let_the_lease_run_out,
    Conversation.stop_service,
    Conversation.run_late,
]
COURSES = st.lists(st.sampled_from([*OFTEN * 12, *NOW_AND_THEN * 6, *RARELY]), min_size=25, max_size=80)


@settings(max_examples=400)
@given(COURSES)
def test_whatever_is_lost_late_or_doubled_nothing_launches_twice_and_both_sides_agree(
    course: list[Callable[[Conversation], None]],
) -> None:
    talk = Conversation()
    talk.connect()
    for act in course:
        before = talk.ledger.launches
        act(talk)
        assert talk.ledger.launches <= 1
        assert talk.ledger.launches == before or talk.mirror.record.start_intended
        if talk.mirror.record.state is State.RUNNING:
            assert talk.ledger.launches == 1
    talk.come_to_an_end()
    assert talk.ledger.launches <= 1
    assert talk.mirror.record.state is State.RELEASED
    if talk.ledger.record is None:
        assert talk.mirror.record.outcome in (Outcome.CANCELLED, Outcome.FAILED)
    else:
        known, said = talk.mirror.record, talk.ledger.record
        if (
            not talk.ledger.launches
        ):  # an admission that came after its attempt was given up has lapsed at once
            said = replace(said, outcome=known.outcome, reason=known.reason)
        assert known == said


def test_the_happy_course_is_admit_start_probe() -> None:
    ledger, mirror = Ledger(), Mirror()
    mirror.connected = True
    sent = []
    for _ in range(20):
        call = mirror.step()
        mirror.under_way = None
        if call is not None:
            sent.append(call)
            ledger.take(call)
        ledger.work(fails=False)
        mirror.reported = ledger.record
    assert sent == [SendAdmit(), SendStart()]
    assert mirror.record == ledger.record == Record(State.RUNNING, True)
    assert mirror.ready
    assert ledger.launches == 1


def test_an_admission_that_arrives_after_all_is_over_never_runs() -> None:
    """It was lost with its connection; the attempt was given up; then the executor gets it after all. The
    lease that came with it ends what it holds."""
    ledger, mirror = Ledger(), Mirror()
    mirror.connected = True
    late = mirror.step()
    assert late == SendAdmit()
    mirror.connected, mirror.under_way, mirror.wanted = False, None, False
    assert mirror.step() is None
    assert mirror.record == Record()
    mirror.connected = True
    for _ in range(3):
        if mirror.step() == Ask():
            mirror.under_way, mirror.denied = None, True
    assert mirror.record.state is State.RELEASED
    ledger.take(late)
    for _ in range(5):
        ledger.work(fails=False)
    assert ledger.record == Record(State.PREPARED)
    ledger.end_of_lease()
    ledger.work(fails=False)
    assert ledger.record is not None
    assert (ledger.record.state, ledger.record.outcome) == (State.RELEASED, Outcome.FAILED)
    assert ledger.launches == 0
