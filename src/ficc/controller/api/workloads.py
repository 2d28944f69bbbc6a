"""Workloads: batch jobs, what carries replicas, what they leave; and the audit."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from ficc.controller.api import shapes
from ficc.controller.api import workload_shapes as workloads
from ficc.controller.api.caller import Caller
from ficc.controller.api.parts import IdPath, Ops, Paging, listed, router
from ficc.controller.operations.submission import Submission
from ficc.controller.operations.workloads import Part

routes = router("workloads")


@routes.get("/workloads", response_model=shapes.Page[workloads.Workload])
async def list_workloads(actor: Caller, operations: Ops, page: Paging) -> dict[str, Any]:
    """Jobs and what carries replicas, newest first, without their plans. Scope: jobs:read."""
    found, cursor = await operations.workloads.page(actor, page)
    return listed([view.as_json() for view in found], cursor)


@routes.get(
    "/workloads/{workload_id}", response_model=workloads.WorkloadInFull, response_model_exclude_unset=True
)
async def get_workload(actor: Caller, operations: Ops, workload_id: IdPath) -> dict[str, Any]:
    """One workload with its plan. Scope: jobs:read."""
    return (await operations.workloads.get(actor, workload_id)).as_json()


@routes.post(
    "/workloads",
    response_model=workloads.WorkloadInFull,
    response_model_exclude_unset=True,
    status_code=202,
    responses={200: {"model": workloads.WorkloadInFull, "description": "The key made this job before."}},
)
async def submit_job(
    actor: Caller, operations: Ops, job: workloads.SubmitJob, response: Response
) -> dict[str, Any]:
    """Submit a finite command to a node. Scopes: jobs:execute, contributors:read, and models:read where it has
    inputs."""
    submission = Submission(
        node_id=job.node_id,
        runtime=job.runtime.to_domain(),
        argv=tuple(job.argv),
        environment=job.environment,
        limits=job.limits.to_domain(),
        inputs=tuple((entry.name, entry.sha256) for entry in job.inputs),
        outputs=tuple(job.outputs),
        sensitive=job.sensitive,
        deadline_seconds=job.deadline_seconds,
        idempotency_key=job.idempotency_key,
    )
    view, made = await operations.workloads.submit(actor, submission)
    response.status_code = 202 if made else 200
    return view.as_json()


@routes.post(
    "/workloads/{workload_id}/cancel",
    response_model=workloads.WorkloadInFull,
    response_model_exclude_unset=True,
    status_code=202,
)
async def cancel_job(
    actor: Caller, operations: Ops, workload_id: IdPath, control: workloads.ControlWorkload
) -> dict[str, Any]:
    """End a job that has not ended. Scope: jobs:cancel."""
    return (await operations.workloads.cancel(actor, workload_id, control.revision)).as_json()


@routes.post(
    "/workloads/{workload_id}/retry",
    response_model=workloads.WorkloadInFull,
    response_model_exclude_unset=True,
    status_code=202,
)
async def retry_job(
    actor: Caller, operations: Ops, workload_id: IdPath, control: workloads.RetryJob
) -> dict[str, Any]:
    """Run a job that has ended and is released once more, from its beginning. Scopes: jobs:execute,
    contributors:read, and models:read where it has inputs."""
    view = await operations.workloads.retry(
        actor, workload_id, control.revision, acknowledge_unknown=bool(control.acknowledge_unknown)
    )
    return view.as_json()


@routes.post(
    "/workloads/{workload_id}/release",
    response_model=workloads.WorkloadInFull,
    response_model_exclude_unset=True,
)
async def release_workload(
    actor: Caller,
    operations: Ops,
    workload_id: IdPath,
    control: workloads.ReleaseWorkload,
    request: Request,
) -> dict[str, Any]:
    """Give back what a job or a replica holds on a node that will not come back, once its lease is over. Audited.
    Scope: jobs:cancel."""
    view = await operations.workloads.release(
        actor, workload_id, control.revision, request.scope["ficc.request_id"]
    )
    return view.as_json()


@routes.post("/workloads/{workload_id}/remove", response_model=shapes.Removed)
async def remove_job(
    actor: Caller, operations: Ops, workload_id: IdPath, control: workloads.ControlWorkload
) -> dict[str, Any]:
    """Forget a job that has ended and is released, with its log and outputs. Scope: jobs:cancel."""
    await operations.workloads.remove(actor, workload_id, control.revision)
    return {"removed": True}


@routes.post("/workloads/{workload_id}/output", response_model=workloads.OutputPart)
async def read_output(
    actor: Caller, operations: Ops, workload_id: IdPath, wanted: workloads.ReadOutput
) -> dict[str, Any]:
    """A part of an output that the plan names, once its attempt has ended, or of the log. Scope: jobs:logs."""
    part = Part(wanted.name, wanted.stream, wanted.attempt, wanted.offset, wanted.limit)
    return await operations.workloads.output(actor, workload_id, part)


@routes.get("/audit", response_model=shapes.Page[workloads.AuditEntry])
async def list_audit(actor: Caller, operations: Ops, page: Paging) -> dict[str, Any]:
    """Who did what to what, newest first. Scope: audit:read."""
    return listed(*await operations.audit.page(actor, page))
