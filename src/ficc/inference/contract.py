"""The adapter contract: how an engine is told what to run.

An adapter is found by its entry point in the group `ficc.inference`: a factory without arguments whose
object has `API_VERSION = 1` and `job(specification, model_record, placement, immutable_input_references)`.
It translates engine options and model semantics into a job and does nothing else: it starts no process,
opens no file and no socket. Executors own those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ficc.domain.manifest import Manifest
from ficc.domain.plan import Endpoint, Input, Limits, Plan, Runtime
from ficc.inference.schema import Placement, Specification

API_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What an adapter may know of a model."""

    id: str
    revision: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Probe:
    """A request whose 200 answer shows that the engine answers for real."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What an adapter returns: all of a plan that it decides, and how readiness shows."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    limits: Limits
    inputs: tuple[Input, ...]
    endpoint: Endpoint
    readiness: Probe
    model_revision: str
    outputs: tuple[str, ...] = ()
    sensitive: bool = False
    upload_as: str | None = None
    """For an engine that takes its model over its own API: the name under which the executor hands it the inputs of
    `endpoint.upload_input_ids`, before the probe. It is written as an alias is."""

    def readiness_document(self) -> dict[str, Any]:
        """What has to happen until the engine is ready, as a controller records it."""
        document: dict[str, Any] = {"path": self.readiness.path, "body": dict(self.readiness.body)}
        if self.upload_as is not None:
            inputs = list(self.endpoint.upload_input_ids)
            document["upload"] = {"model": self.upload_as, "input_ids": inputs}
        return document

    def plan(self, node_id: str, runtime: Runtime) -> Plan:
        """The plan of this job on a node, checked. Raises Refused for what no executor launches."""
        plan = Plan(
            node_id=node_id,
            runtime=runtime,
            argv=self.argv,
            environment=self.environment,
            limits=self.limits,
            inputs=self.inputs,
            outputs=self.outputs,
            sensitive=self.sensitive,
            model_revision=self.model_revision,
            endpoint=self.endpoint,
        )
        plan.check()
        return plan


@runtime_checkable
class Adapter(Protocol):
    """One engine. Raises `ficc.domain.errors.Refused` for what the engine cannot do."""

    API_VERSION: int

    def job(
        self,
        specification: Specification,
        model_record: ModelRecord,
        placement: Placement,
        immutable_input_references: Sequence[Input],
    ) -> Job: ...


def input_references(manifest: Manifest) -> tuple[Input, ...]:
    """The model's files as inputs, in the manifest's order."""
    return tuple(
        Input(id=f"model-{index}", sha256=file.sha256, bytes=file.bytes, name=file.name)
        for index, file in enumerate(manifest.files)
    )
