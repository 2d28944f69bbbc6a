"""Placement: the arithmetic of reservations, and each reason for a no."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.estimate import Estimate
from ficc.domain.placement import NOTHING, Node, Snapshot, Verdict, available, place, total
from ficc.domain.plan import COUNTED, Endpoint, Limits, Plan, Runtime

NODE, OTHER = "0" * 26, "1" * 26
RUNTIME = Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64)
CAPACITY = Limits(8000, 1000, 500, 400, 300, 200, ("GPU-0", "GPU-1"))
SMALL = Limits(1000, 100, 0, 10, 10, 10)
NO_NEED = Estimate(weights_bytes=0, overhead_bytes=0)


def snapshot(*, free: Limits = CAPACITY, endpoint_version: int | None = 1, **unenforceable: str) -> Snapshot:
    return Snapshot("boot", CAPACITY, free, (RUNTIME,), unenforceable, endpoint_version)


def node(
    seen: Snapshot | None = None, *, reserved: Limits = NOTHING, connected: bool = True, id: str = NODE
) -> Node:
    return Node(id, "box", connected, seen or snapshot(), reserved)


def plan(limits: Limits = SMALL, *, node_id: str = NODE, runtime: Runtime = RUNTIME) -> Plan:
    endpoint = Endpoint("unix", "/run/ficc/e.sock", (), 1, 1)
    return Plan(node_id, runtime, ("/x",), {}, limits, endpoint=endpoint)


def verdicts(*plans: Plan, nodes: list[Node] | None = None) -> list[Verdict]:
    by_id = {one.id: one for one in (nodes if nodes is not None else [node()])}
    return place([(one, NO_NEED) for one in plans], by_id)


def codes(verdict: Verdict) -> list[str]:
    assert verdict.fits == (not verdict.problems)
    return [problem.code for problem in verdict.problems]


# What is available.


def test_available_is_the_least_of_capacity_less_reservations_and_what_is_free() -> None:
    free = replace(CAPACITY, cpu_millis=3000, memory_bytes=900, gpu_devices=("GPU-1",))
    reserved = Limits(2000, 300, 0, 0, 0, 0, ())
    assert available(snapshot(free=free), reserved) == Limits(3000, 700, 500, 400, 300, 200, ("GPU-1",))


def test_available_never_falls_below_zero() -> None:
    over = Limits(9000, 2000, 900, 900, 900, 900, ("GPU-0", "GPU-1"))
    assert available(snapshot(), over) == NOTHING


AMOUNTS = st.builds(
    Limits,
    *([st.integers(0, 50)] * len(COUNTED)),
    st.lists(st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]), unique=True).map(tuple),
)


@given(AMOUNTS, AMOUNTS, AMOUNTS)
def test_what_is_available_was_neither_promised_nor_used(
    capacity: Limits, free: Limits, reserved: Limits
) -> None:
    room = available(Snapshot("boot", capacity, free, ()), reserved)
    for name in COUNTED:
        wanted = min(getattr(capacity, name) - getattr(reserved, name), getattr(free, name))
        assert getattr(room, name) == max(0, wanted)
    assert set(room.gpu_devices) == set(capacity.gpu_devices) & set(free.gpu_devices) - set(
        reserved.gpu_devices
    )


@given(st.lists(AMOUNTS, max_size=4))
def test_reservations_add_up_and_devices_are_united(limits: list[Limits]) -> None:
    summed = total(limits)
    for name in COUNTED:
        assert getattr(summed, name) == sum(getattr(one, name) for one in limits)
    assert set(summed.gpu_devices) == {device for one in limits for device in one.gpu_devices}
    assert list(summed.gpu_devices) == sorted(set(summed.gpu_devices))


# Several replicas of one submission.


def test_replicas_on_one_node_count_each_other() -> None:
    four_hundred = replace(SMALL, memory_bytes=400)
    found = verdicts(*[plan(four_hundred)] * 4)
    assert [verdict.fits for verdict in found] == [True, True, False, False]
    assert [v.available.memory_bytes for v in found if v.available] == [1000, 600, 200, 200]


def test_one_that_does_not_fit_takes_nothing_from_the_others() -> None:
    first, second = verdicts(plan(replace(SMALL, memory_bytes=2000)), plan(replace(SMALL, memory_bytes=1000)))
    assert (first.fits, second.fits) == (False, True)


def test_l12_replicas_share_what_is_measured_free() -> None:
    """Nothing measures what is only about to be reserved: 600 are free of 1000, and 2 x 400 do not fit."""
    busy = node(snapshot(free=replace(CAPACITY, memory_bytes=600)))
    four_hundred = replace(SMALL, memory_bytes=400)
    first, second = verdicts(plan(four_hundred), plan(four_hundred), nodes=[busy])
    assert first.fits
    assert codes(second) == ["does_not_fit"]
    assert "400 B wanted, 200 B available" in second.problems[0].message


def test_replicas_on_other_nodes_do_not_count() -> None:
    most = replace(SMALL, memory_bytes=900)
    both = verdicts(plan(most), plan(most, node_id=OTHER), nodes=[node(), node(id=OTHER)])
    assert all(verdict.fits for verdict in both)


def test_devices_are_exclusive_within_a_submission_and_against_what_is_reserved() -> None:
    one = replace(SMALL, gpu_devices=("GPU-0",))
    other = replace(SMALL, gpu_devices=("GPU-1",))
    first, second, third = verdicts(plan(one), plan(other), plan(one))
    assert (first.fits, second.fits) == (True, True)
    assert codes(third) == ["does_not_fit"]
    assert "GPU-0 is taken on box" in third.problems[0].message
    (held,) = verdicts(plan(one), nodes=[node(reserved=replace(NOTHING, gpu_devices=("GPU-0",)))])
    assert codes(held) == ["does_not_fit"]


@given(st.lists(AMOUNTS, min_size=1, max_size=5), AMOUNTS, AMOUNTS, AMOUNTS)
def test_whatever_is_accepted_together_fits_together(
    wanted: list[Limits], capacity: Limits, free: Limits, reserved: Limits
) -> None:
    seen = Snapshot("boot", capacity, free, (RUNTIME,), endpoint_version=1)
    found = verdicts(*(plan(limits) for limits in wanted), nodes=[Node(NODE, "box", True, seen, reserved)])
    if all(verdict.fits for verdict in found):
        together = total(wanted)
        for name in COUNTED:
            if getattr(together, name):
                assert getattr(together, name) + getattr(reserved, name) <= getattr(capacity, name)
                assert getattr(together, name) <= getattr(free, name)
        devices = [device for limits in wanted for device in limits.gpu_devices]
        assert len(devices) == len(set(devices))
        assert not set(devices) & set(reserved.gpu_devices)


# Each reason for a no.


@pytest.mark.parametrize("name", COUNTED)
def test_each_amount_at_its_border_and_one_past_it(name: str) -> None:
    room = getattr(CAPACITY, name)
    fits, past = (
        verdicts(plan(replace(SMALL, **{name: room})))[0],
        verdicts(plan(replace(SMALL, **{name: room + 1})))[0],
    )
    assert fits.fits
    assert codes(past) == ["does_not_fit"]
    assert name in past.problems[0].message


def test_every_shortage_is_named_at_once() -> None:
    (verdict,) = verdicts(plan(Limits(9000, 2000, 0, 10, 10, 10, ("GPU-0", "GPU-7"))))
    assert codes(verdict) == ["does_not_fit", "does_not_fit", "gpu_missing"]
    assert verdict.available == CAPACITY


def test_an_unknown_node() -> None:
    (verdict,) = verdicts(plan(), nodes=[])
    assert codes(verdict) == ["node_unknown"]
    assert verdict.available is None


@pytest.mark.parametrize("gone", [node(connected=False), replace(node(), snapshot=None)])
def test_a_node_that_is_not_connected_or_said_nothing_yet(gone: Node) -> None:
    (verdict,) = verdicts(plan(), nodes=[gone])
    assert codes(verdict) == ["node_disconnected"]
    assert verdict.available is None


@pytest.mark.parametrize("version", [None, 0, 2])
def test_l15_a_node_without_the_endpoint_version_runs_jobs_but_no_inference(version: int | None) -> None:
    old = node(snapshot(endpoint_version=version))
    assert codes(verdicts(plan(), nodes=[old])[0]) == ["endpoint_unsupported"]
    assert verdicts(replace(plan(), endpoint=None), nodes=[old])[0].fits


def test_a_runtime_that_the_node_lacks_or_has_in_another_build() -> None:
    other_image = replace(RUNTIME, image_digest="sha256:" + "c" * 64)
    upgraded = replace(RUNTIME, package_digest="d" * 64)
    assert codes(verdicts(plan(runtime=other_image))[0]) == ["image_not_found"]
    assert codes(verdicts(plan(runtime=upgraded))[0]) == ["runtime_changed"]


def test_a_limit_that_the_machine_cannot_enforce() -> None:
    (verdict,) = verdicts(plan(), nodes=[node(snapshot(memory_bytes="no cgroup"))])
    assert codes(verdict) == ["limits_unenforceable"]
    assert "memory_bytes cannot be enforced on" in verdict.problems[0].message


def test_devices_need_to_be_enforceable_only_where_they_are_asked_for() -> None:
    blind = node(snapshot(gpu_devices="no CDI"))
    assert verdicts(plan(), nodes=[blind])[0].fits
    assert codes(verdicts(plan(replace(SMALL, gpu_devices=("GPU-0",))), nodes=[blind])[0]) == [
        "limits_unenforceable"
    ]


def test_l11_a_missing_gpu_is_no_fall_back() -> None:
    without = replace(CAPACITY, gpu_devices=())
    seen = Snapshot("boot", without, without, (RUNTIME,), endpoint_version=1)
    (verdict,) = verdicts(plan(replace(SMALL, gpu_devices=("GPU-0",))), nodes=[node(seen)])
    assert codes(verdict) == ["gpu_missing"]


@pytest.mark.parametrize(("needed", "fits"), [(100, True), (101, False)])
def test_the_model_has_to_fit_its_own_limit(needed: int, fits: bool) -> None:
    (verdict,) = place([(plan(), Estimate(needed, 0))], {NODE: node()})
    assert codes(verdict) == ([] if fits else ["memory_limit_too_small"])


# A warning.


@pytest.mark.parametrize(("memory", "warned"), [(900, False), (901, True), (1000, True)])
def test_above_nine_tenths_it_is_tight(memory: int, warned: bool) -> None:
    (verdict,) = verdicts(plan(replace(SMALL, memory_bytes=memory)))
    assert verdict.fits
    assert [warning.code for warning in verdict.warnings] == ["tight"] * warned
    assert all(f"{1000 - memory} B spare" in warning.message for warning in verdict.warnings)


def test_what_does_not_fit_is_not_called_tight() -> None:
    (verdict,) = verdicts(plan(replace(SMALL, memory_bytes=1001)))
    assert verdict.warnings == ()


def test_what_is_missing_is_seen_however_little_it_is() -> None:
    (verdict,) = verdicts(plan(replace(SMALL, memory_bytes=1001)))
    assert "1001 wanted, 1000 available (memory_bytes)" in verdict.problems[0].message


# Snapshots.


def test_a_snapshot_is_read_from_what_an_executor_says() -> None:
    said = {
        "boot_id": "boot",
        "capacity": CAPACITY.as_json(),
        "free": SMALL.as_json(),
        "runtimes": [{**RUNTIME.as_json(), "name": "llama", "created_at": 5}],
        "unenforceable": {"swap_bytes": "no swap accounting"},
        "endpoint_version": 1,
        "machine": {},
    }
    assert Snapshot.from_json(said) == Snapshot(
        "boot", CAPACITY, SMALL, (RUNTIME,), {"swap_bytes": "no swap accounting"}, 1
    )


def test_l15_an_old_snapshot_has_no_endpoint_version() -> None:
    said = {"boot_id": "b", "capacity": SMALL.as_json(), "free": SMALL.as_json(), "runtimes": []}
    assert Snapshot.from_json(said).endpoint_version is None
