"""Placement: whether a plan fits a node, in numbers.

Capacity is what the executor offers, reserved is the sum over attempts that are not released, free is what
the machine measures (other programs use memory too). Available is the least that all three allow.
Replicas of one submission are checked in order, each against what the earlier ones leave: these are in no
reservation and in no measurement yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ficc.domain.errors import Reason, Refused
from ficc.domain.estimate import Estimate
from ficc.domain.plan import COUNTED, Limits, Plan, Runtime
from ficc.domain.quantity import amount, size

TIGHT_FRACTION = 0.9
"""Above this share of what is available a placement fits, with a warning."""

ENDPOINT_VERSION = 1
"""Of the endpoint's protocol: what an executor of this release offers, and inference needs."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an executor says of itself. `unenforceable` maps a limit's name to why this machine cannot
    enforce it."""

    boot_id: str
    capacity: Limits
    free: Limits
    runtimes: tuple[Runtime, ...]
    unenforceable: Mapping[str, str] = field(default_factory=dict)
    endpoint_version: int | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Snapshot:
        return cls(
            boot_id=document["boot_id"],
            capacity=Limits.from_json(document["capacity"]),
            free=Limits.from_json(document["free"]),
            runtimes=tuple(
                Runtime(**{name: entry[name] for name in Runtime.__dataclass_fields__})
                for entry in document["runtimes"]
            ),
            unenforceable=dict(document.get("unenforceable", {})),
            endpoint_version=document.get("endpoint_version"),
        )


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    name: str
    connected: bool
    snapshot: Snapshot | None
    reserved: Limits


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one replica fares: `fits` exactly when `problems` is empty."""

    available: Limits | None
    problems: tuple[Reason, ...]
    warnings: tuple[Reason, ...]

    @property
    def fits(self) -> bool:
        return not self.problems


NOTHING = Limits(0, 0, 0, 0, 0, 0)


def total(limits: Iterable[Limits]) -> Limits:
    """The sum of reservations; devices are united."""
    result = NOTHING
    for entry in limits:
        result = replace(
            result,
            **{name: getattr(result, name) + getattr(entry, name) for name in COUNTED},
            gpu_devices=tuple(sorted({*result.gpu_devices, *entry.gpu_devices})),
        )
    return result


def available(snapshot: Snapshot, reserved: Limits) -> Limits:
    """Capacity less reservations, and no more than is measured free; never below zero."""
    counted = {
        name: max(
            0,
            min(
                getattr(snapshot.capacity, name) - getattr(reserved, name),
                getattr(snapshot.free, name),
            ),
        )
        for name in COUNTED
    }
    devices = tuple(
        d
        for d in snapshot.capacity.gpu_devices
        if d in snapshot.free.gpu_devices and d not in reserved.gpu_devices
    )
    return Limits(**counted, gpu_devices=devices)


def less(room: Limits, taken: Limits) -> Limits:
    """What is left of the room when that is taken; never below zero."""
    counted = {name: max(0, getattr(room, name) - getattr(taken, name)) for name in COUNTED}
    return Limits(**counted, gpu_devices=tuple(d for d in room.gpu_devices if d not in taken.gpu_devices))


def place(plans: Sequence[tuple[Plan, Estimate]], nodes: Mapping[str, Node]) -> list[Verdict]:
    """A verdict for each plan, in order."""
    verdicts: list[Verdict] = []
    held: dict[str, list[Limits]] = {}
    for plan, estimate in plans:
        earlier = held.setdefault(plan.node_id, [])
        verdict = _verdict(plan, estimate, nodes.get(plan.node_id), earlier)
        verdicts.append(verdict)
        if verdict.fits:  # one that does not fit takes nothing from the others
            earlier.append(plan.limits)
    return verdicts


def _verdict(plan: Plan, estimate: Estimate, node: Node | None, earlier: Sequence[Limits]) -> Verdict:
    if node is None:
        reason = Reason("node_unknown", "No such node in this project; list them with `ficc node list`.")
        return Verdict(None, (reason,), ())
    snapshot = node.snapshot
    if not node.connected or snapshot is None:
        reason = Reason("node_disconnected", f"{node.name} is not connected; start its executor.")
        return Verdict(None, (reason,), ())
    room = less(available(snapshot, node.reserved), total(earlier))
    problems = [
        *_runtime_problems(plan, node.name, snapshot),
        *(
            one.reason
            for one in unmet(plan.limits, room, snapshot.capacity, snapshot.unenforceable, node.name)
        ),
    ]
    if estimate.host_bytes > plan.limits.memory_bytes:
        problems.append(
            Reason(
                "memory_limit_too_small",
                f"The model needs {size(estimate.host_bytes)} ({estimate.basis}), the placement allows "
                f"{size(plan.limits.memory_bytes)}; raise limits.memory_bytes or choose a smaller file.",
            )
        )
    warnings: list[Reason] = []
    if not problems and plan.limits.memory_bytes > TIGHT_FRACTION * room.memory_bytes:
        spare = room.memory_bytes - plan.limits.memory_bytes
        warnings.append(Reason("tight", f"Tight on {node.name}: {size(spare)} spare; may fail under load."))
    return Verdict(room, tuple(problems), tuple(warnings))


def _runtime_problems(plan: Plan, name: str, snapshot: Snapshot) -> Iterable[Reason]:
    if plan.endpoint is not None and snapshot.endpoint_version != ENDPOINT_VERSION:
        yield Reason(
            "endpoint_unsupported",
            f"The executor of {name} has no endpoint version {ENDPOINT_VERSION}: it runs jobs, but no "
            "inference. Upgrade it.",
        )
    if plan.runtime in snapshot.runtimes:
        return
    same_image = [r for r in snapshot.runtimes if r.image_digest == plan.runtime.image_digest]
    if same_image:
        yield Reason(
            "runtime_changed",
            f"{name} has this image under another provider or package digest; the provider was upgraded. "
            "Use the runtime that `ficc runtime list` shows.",
        )
    else:
        yield Reason(
            "image_not_found",
            f"{name} has no image {plan.runtime.image_digest}; build or import it there first.",
        )


def unmet(
    wanted: Limits, room: Limits, capacity: Limits, unenforceable: Mapping[str, str], where: str
) -> Iterator[Refused]:
    """Why limits are not to be had on a machine, each as a refusal that names the limit: the controller
    collects them before it plans, the executor raises the first before it admits."""
    for name, why in unenforceable.items():
        if name != "gpu_devices" or wanted.gpu_devices:
            yield Refused("limits_unenforceable", f"{name} cannot be enforced on {where}: {why}", name)
    for name in COUNTED:
        asked, there = getattr(wanted, name), getattr(room, name)
        if asked > there:
            wanted_text, there_text = amount(name, asked), amount(name, there)
            if wanted_text == there_text:  # they differ by less than is shown
                wanted_text, there_text = str(asked), str(there)
            message = f"Does not fit on {where}: {wanted_text} wanted, {there_text} available ({name})."
            yield Refused("does_not_fit", message, name)
    for device in wanted.gpu_devices:
        if device not in capacity.gpu_devices:
            yield Refused("gpu_missing", f"There is no GPU {device} on {where}.", "gpu_devices")
        elif device not in room.gpu_devices:
            yield Refused("does_not_fit", f"GPU {device} is taken on {where}.", "gpu_devices")
