"""The shapes of workloads: jobs as they are submitted, what is shown of them, and of the audit."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from ficc.controller.api.shapes import Amounts, Answer, ReasonShape, Revision, printable
from ficc.domain import plan
from ficc.domain.workload import DEADLINE_SECONDS_MAX
from ficc.inference.schema import Id, Limits, Runtime, Sha256, Strict

OUTPUT_BYTES_MAX = 1 << 20
OUTPUT_BYTES_DEFAULT = 64 << 10

Argument = Annotated[str, StringConstraints(max_length=plan.ARGUMENT_BYTES_MAX)]
FileName = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Outcome = Literal["succeeded", "failed", "cancelled", "unknown"]


class JobInput(Strict):
    """A file of one of the project's models, to be found in the sandbox at /inputs/NAME."""

    name: FileName
    sha256: Sha256


class SubmitJob(Strict):
    node_id: Id
    runtime: Runtime
    argv: Annotated[list[Argument], Field(min_length=1, max_length=plan.ARGUMENTS_MAX)]
    environment: Annotated[dict[str, Argument], Field(max_length=plan.ENVIRONMENT_MAX)] = Field(
        default_factory=dict
    )
    limits: Limits
    inputs: Annotated[list[JobInput], Field(max_length=plan.INPUTS_MAX)] = Field(default_factory=list)
    outputs: Annotated[list[FileName], Field(max_length=plan.OUTPUTS_MAX)] = Field(
        default_factory=list, description="Files that the command leaves in /run/ficc, by their paths there."
    )
    sensitive: bool = Field(
        default=False,
        description="The values of the environment never come back, and no reason quotes the output.",
    )
    deadline_seconds: Annotated[int, Field(ge=1, le=DEADLINE_SECONDS_MAX)] = Field(
        description="From the submission, or a retry, until the command has to have ended."
    )
    idempotency_key: (
        Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(printable)] | None
    ) = Field(
        default=None,
        description="The same key with the same job is answered with the job that it made, as long as that is there.",
    )


class ControlWorkload(Strict):
    revision: Revision


class RetryJob(Strict):
    revision: Revision
    acknowledge_unknown: bool | None = None


class ReleaseWorkload(Strict):
    revision: Revision
    acknowledge_unknown: Literal[True] = Field(
        description="Nobody can know what the attempt did, nor whether it does it still."
    )


class ReadOutput(Strict):
    """`name`, or `stream`."""

    name: FileName | None = None
    stream: Literal["log"] | None = None
    attempt: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = Field(
        default=None, description="Its number; by default the newest."
    )
    offset: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    limit: Annotated[int, Field(ge=1, le=OUTPUT_BYTES_MAX)] = OUTPUT_BYTES_DEFAULT


class OutputPart(Answer):
    attempt_id: str
    data: str = Field(description="Base64.")
    offset: int
    next_offset: int
    bytes_total: int = Field(description="What is kept of it now; of a log that is still written it grows.")
    truncated: bool = Field(
        description="More was written than is kept: of a log the newest, of a file its beginning."
    )


class WorkloadAttempt(Answer):
    attempt_id: str
    attempt: int
    state: Literal[
        "planned",
        "admitted",
        "staging",
        "prepared",
        "starting",
        "running",
        "stopping",
        "finished",
        "released",
    ]
    outcome: Outcome | None
    reason: ReasonShape | None
    released: bool
    created_at: str
    since_at: str


class Workload(Answer):
    """A job, or what carries a replica: then it has a service, a generation and the replica's number."""

    id: str
    project_id: str
    node_id: str
    revision: int
    state: Literal["queued", "running", "stopping", "ended"]
    outcome: Outcome | None
    reason: ReasonShape | None
    released: bool = Field(
        description="Nothing of it is left on its node, and its reservation is given back."
    )
    plan_digest: str
    sensitive: bool
    attempts: list[WorkloadAttempt] = Field(description="Newest first, at most ten.")
    deadline_seconds: int | None
    deadline_at: str | None
    idempotency_key: str | None
    service_id: str | None
    generation: int | None
    replica: int | None
    model_revision: str | None
    created_at: str


class PlanInput(Answer):
    id: str
    sha256: str
    bytes: int
    name: str


class PlanShape(Answer):
    """What is launched. The values of a sensitive plan's environment are null."""

    plan_version: int
    node_id: str
    runtime: Runtime
    argv: list[str]
    environment: dict[str, str | None]
    limits: Amounts
    inputs: list[PlanInput]
    outputs: list[str]
    sensitive: bool
    model_revision: str | None = None
    endpoint: dict[str, Any] | None = None


class WorkloadInFull(Workload):
    plan: PlanShape


class AuditAuthority(Answer):
    kind: Literal["session", "token", "service_token", "setting"]
    id: str


class AuditObject(Answer):
    kind: str
    id: str


class AuditEntry(Answer):
    id: str
    at: str
    subject_id: str
    authority: AuditAuthority
    action: str
    object: AuditObject
    request_id: str
    outcome: str
    details: dict[str, Any]
