"""What an executor takes, measured against its provider."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ficc.domain import ids
from ficc.domain.errors import Refused
from ficc.domain.plan import Endpoint, Fence, Limits, Plan, Runtime
from ficc.executor import acceptance

NODE_ID = ids.make(1, bytes(10))
LIMITS = Limits(100, 64 << 20)


def provider(*transports: str) -> Any:
    return SimpleNamespace(
        name="some", package_digest="a" * 64, isolation="shared-kernel", transports=transports
    )


def plan(endpoint: Endpoint | None, **changes: Any) -> Plan:
    runtime = Runtime("some", "a" * 64, "sha256:" + "b" * 64)
    return Plan(
        **{"node_id": NODE_ID, "runtime": runtime, "argv": ("/e",), "environment": {}, **changes},
        limits=LIMITS,
        endpoint=endpoint,
    )


def check(found: Plan, *transports: str, digest: str | None = None) -> None:
    fence = Fence(ids.make(2, bytes(10)), 1, digest or found.digest)
    acceptance.check(fence, found, NODE_ID, provider(*transports))


UNIX = Endpoint("unix", "/run/ficc/e.sock", (), 1, 1)
TCP = Endpoint("tcp", 11434, (), 1, 1)


def test_an_endpoint_that_the_provider_cannot_reach_is_refused() -> None:
    check(plan(UNIX), "unix")
    check(plan(TCP), "unix", "tcp")
    check(plan(None), "unix")
    with pytest.raises(Refused, match="some reaches an endpoint by unix, not by tcp") as refused:
        check(plan(TCP), "unix")
    assert refused.value.param == "plan.endpoint.transport"
    with pytest.raises(Refused, match="some reaches an endpoint by tcp, not by unix"):
        check(plan(UNIX), "tcp")


def test_a_plan_for_another_node_or_with_another_digest_is_fenced() -> None:
    """An admission is bound to the identity of this executor."""
    for found, digest in ((plan(None, node_id=ids.make(3, bytes(10))), None), (plan(None), "0" * 64)):
        with pytest.raises(Refused) as refused:
            check(found, "unix", digest=digest)
        assert refused.value.code == "fenced"
