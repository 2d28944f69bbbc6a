"""L17: logs of released attempts are kept up to a number and a size, and those of one plan cost nobody else's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ficc.executor.retention import OF_ONE_PLAN, Released, surplus


def released(plans: str, log_bytes: int = 10) -> list[Released]:
    """One attempt for each letter, of the plan that it names; the newest first."""
    return [Released(f"{plan}{n}", plan, log_bytes) for n, plan in enumerate(plans)]


def test_nothing_is_forgotten_within_the_bounds() -> None:
    assert surplus(released("aaaaaaaa"), 8, 80) == []


def test_the_oldest_goes_first() -> None:
    assert surplus(released("abcd"), 2, 1000) == ["d3", "c2"]
    assert surplus(released("abcd"), 100, 29) == ["d3", "c2"]


def test_a_plan_with_many_attempts_loses_its_oldest_before_anybody_else() -> None:
    """`b` is older than all of them."""
    assert surplus(released("aaaaaaab"), 6, 1000) == ["a6", "a5"]
    assert surplus(released("aaaaaaab"), 5, 1000) == ["a6", "a5", "b7"]


ATTEMPTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=30).map(
    lambda made: [Released(f"{plan}{n}", plan, size) for n, (plan, size) in enumerate(made)]
)


@given(ATTEMPTS, st.integers(0, 30), st.integers(0, 1000))
def test_what_is_left_is_within_the_bounds_and_nothing_goes_without_need(
    attempts: list[Released], number_max: int, bytes_max: int
) -> None:
    forgotten = surplus(attempts, number_max, bytes_max)
    left = [one for one in attempts if one.attempt_id not in forgotten]
    assert len(left) <= number_max
    assert sum(one.log_bytes for one in left) <= bytes_max
    if forgotten:
        last = next(one for one in attempts if one.attempt_id == forgotten[-1])
        assert len(left) == number_max or sum(one.log_bytes for one in left) + last.log_bytes > bytes_max
    if any(sum(one.plan_digest == plan for one in left) > OF_ONE_PLAN for plan in "abc"):
        by_plan = {plan: [o.attempt_id for o in attempts if o.plan_digest == plan] for plan in "abc"}
        assert all(by_plan[a[0]].index(a) >= OF_ONE_PLAN for a in forgotten)
