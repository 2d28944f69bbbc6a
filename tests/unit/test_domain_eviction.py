"""What a removal frees and keeps, and who forbids it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.errors import Refused
from ficc.domain.eviction import Holders, Holding, Outcome, outcome
from ficc.domain.upload import Record, State

DIGESTS = [digit * 64 for digit in "abcd"]


def holding(
    state: State = State.VERIFIED,
    offset: int = 10,
    digest: str = DIGESTS[0],
    *,
    needed: bool = False,
    elsewhere: bool = False,
) -> Holding:
    return Holding(Record(digest, 10, offset, state), needed, elsewhere)


@pytest.mark.parametrize(
    ("one", "evict", "dropped", "freed", "retained"),
    [
        (holding(), True, True, 10, 0),
        (holding(), False, False, 0, 10),
        (holding(elsewhere=True), True, True, 0, 10),  # A22: the bytes are another project's too
        (holding(elsewhere=True), False, False, 0, 10),
        (holding(needed=True), True, False, 0, 10),  # A22: another model of the project has them
        (holding(State.PARTIAL, 4), True, True, 4, 0),
        (holding(State.PARTIAL, 4), False, True, 4, 0),
        (holding(State.PARTIAL, 4, elsewhere=True), True, True, 4, 0),  # its own bytes, on their way
        (holding(State.PARTIAL, 4, needed=True), True, False, 0, 4),
        (holding(State.MISSING, 0), True, True, 0, 0),
        (holding(State.FAILED, 0), False, True, 0, 0),
    ],
)
def test_what_becomes_of_one_content(
    one: Holding, evict: bool, dropped: bool, freed: int, retained: int
) -> None:
    expected = frozenset([one.record.sha256] if dropped else [])
    assert outcome([one], evict=evict) == Outcome(expected, freed, retained)


HOLDINGS = st.lists(
    st.builds(
        lambda state, offset, digest, needed, elsewhere: holding(
            state, 10 if state is State.VERIFIED else offset, digest, needed=needed, elsewhere=elsewhere
        ),
        st.sampled_from(State),
        st.integers(0, 10),
        st.sampled_from(DIGESTS),
        st.booleans(),
        st.booleans(),
    ),
    unique_by=lambda one: one.record.sha256,
)


@given(HOLDINGS)
def test_every_durable_byte_is_counted_once_and_nothing_that_is_needed_goes(holdings: list[Holding]) -> None:
    kept, evicted = outcome(holdings, evict=False), outcome(holdings, evict=True)
    total = sum(one.record.offset for one in holdings)
    for found in (kept, evicted):
        assert found.bytes_freed + found.bytes_retained_shared == total
        assert found.dropped.isdisjoint(one.record.sha256 for one in holdings if one.needed)
    assert kept.dropped <= evicted.dropped
    verified = {one.record.sha256 for one in holdings if one.verified}
    assert kept.dropped.isdisjoint(verified)
    assert evicted.dropped - kept.dropped <= verified


def test_who_forbids_it_is_named_services_first() -> None:
    assert Holders().reason is None
    Holders().check()
    for holders, code, details in (
        (Holders(("s",), ("a",), writing=True), "model_referenced", {"services": ["s"], "attempts": ["a"]}),
        (Holders(("s", "t")), "model_referenced", {"services": ["s", "t"]}),
        (Holders(attempts=("a",), writing=True), "model_referenced", {"attempts": ["a"]}),
        (Holders(writing=True), "model_busy", {}),
    ):
        with pytest.raises(Refused) as refused:
            holders.check()
        assert (refused.value.code, refused.value.details) == (code, details)
        assert (refused.value.retry_after_seconds is not None) == (code == "model_busy")
        assert holders.reason == refused.value.reason
