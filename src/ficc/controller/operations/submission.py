"""A job as it is asked for, and the plan that is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ficc.domain import canonical
from ficc.domain.errors import Refused
from ficc.domain.plan import Input, Limits, Plan, Runtime


@dataclass(frozen=True, slots=True)
class Submission:
    """`inputs` are names in the sandbox and digests of what the project has verified."""

    node_id: str
    runtime: Runtime
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    limits: Limits
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[str, ...]
    sensitive: bool
    deadline_seconds: int
    idempotency_key: str | None

    @property
    def digest(self) -> str:
        """Of everything that was asked for, but for the key."""
        asked = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "idempotency_key"}
        return canonical.digest({**asked, "runtime": self.runtime.as_json(), "limits": self.limits.as_json()})

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """The plan, checked. Raises Refused that names what is wrong by its place in the request."""
        plan = Plan(
            node_id=self.node_id,
            runtime=self.runtime,
            argv=self.argv,
            environment=self.environment,
            limits=self.limits,
            inputs=tuple(
                Input(f"input-{index}", sha256, sizes[sha256], name)
                for index, (name, sha256) in enumerate(self.inputs)
            ),
            outputs=self.outputs,
            sensitive=self.sensitive,
        )
        try:
            plan.check()
        except Refused as refused:
            param = None if refused.param is None else refused.param.removeprefix("plan.")
            raise Refused(refused.code, refused.message, param) from None
        return plan
