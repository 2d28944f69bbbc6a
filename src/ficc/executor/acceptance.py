"""Whether this executor takes an attempt: decided before anything is reserved, from the plan and what is held.

A plan comes from a controller with fewer rights than the executor. Its form was checked when it was read
(`Plan.check`); here it is measured against this executor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ficc.domain import ids, placement
from ficc.domain.errors import Refused, invalid
from ficc.domain.plan import LEAST, Fence, Limits, Plan
from ficc.executor.providers.contract import Provider

GENERATION_MAX = 2**63 - 1


def check_fence(fence: Fence) -> Fence:
    """The attempt's id names directories and files, so it must be an id. Raises Refused."""
    if not ids.is_id(fence.attempt_id) or not 0 <= fence.generation <= GENERATION_MAX:
        raise invalid("A fence is an attempt's id, its generation and the digest of its plan.", "fence")
    return fence


def check(fence: Fence, plan: Plan, executor_id: str, provider: Provider) -> None:
    """Refuse what is not for this executor, or what it could not run as it is written. Raises Refused."""
    if plan.digest != fence.plan_digest:
        raise Refused("fenced", f"The plan hashes to {plan.digest}, not to the digest of its fence.")
    if plan.node_id != executor_id:
        raise Refused("fenced", f"The plan is for node {plan.node_id}; this is {executor_id}.")
    runtime = plan.runtime
    if (runtime.provider, runtime.package_digest, runtime.isolation, runtime.network) != (
        provider.name,
        provider.package_digest,
        provider.isolation,
        "none",
    ):
        raise Refused(
            "runtime_changed", "The plan's provider is not the one of this executor, or another build of it."
        )
    for name, least in LEAST.items():
        if getattr(plan.limits, name) < least:
            raise invalid(f"{name} is at least {least} here.", f"plan.limits.{name}")
    endpoint = plan.endpoint
    if endpoint is not None and endpoint.transport not in provider.transports:
        raise invalid(
            f"{provider.name} reaches an endpoint by {' or '.join(provider.transports)}, "
            f"not by {endpoint.transport}.",
            "plan.endpoint.transport",
        )


def check_room(
    wanted: Limits, capacity: Limits, held: Iterable[Limits], unenforceable: Mapping[str, str]
) -> None:
    """Refuse limits that cannot be enforced here, or that do not fit beside what is held. Raises Refused."""
    room = placement.less(capacity, placement.total(held))
    for refused in placement.unmet(wanted, room, capacity, unenforceable, "this machine"):
        raise refused
