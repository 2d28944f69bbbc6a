"""From a specification to plans, judged against the nodes as they are: what a preview shows and a start holds to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ficc.controller.operations.context import Context
from ficc.controller.operations.estimates import Estimates
from ficc.controller.operations.ports import Nodes
from ficc.controller.store import eviction, peaks
from ficc.controller.store import models as model_rows
from ficc.controller.store import nodes as node_rows
from ficc.controller.store.database import Transaction
from ficc.domain import acquisition, canonical, estimate, placement
from ficc.domain.errors import Reason, Refused
from ficc.domain.placement import Snapshot, Verdict
from ficc.domain.plan import Plan
from ficc.inference import registry
from ficc.inference.contract import Job, ModelRecord, input_references
from ficc.inference.schema import Specification


@dataclass(frozen=True, slots=True)
class Planned:
    """A specification turned into plans and judged: what a preview shows and a submission creates."""

    specification: Specification
    model: model_rows.Model
    jobs: tuple[Job, ...]
    plans: tuple[Plan, ...]
    verdicts: tuple[Verdict, ...]
    estimates: tuple[estimate.Estimate, ...]
    doubts: tuple[Reason, ...]

    @property
    def accepted(self) -> bool:
        return all(verdict.fits for verdict in self.verdicts)

    @property
    def preview_digest(self) -> str:
        """Of what would run, not of what happens to be free now."""
        return canonical.digest(
            {"plans": [plan.digest for plan in self.plans], "alias": self.specification.alias}
        )

    def as_json(self) -> dict[str, Any]:
        replicas = []
        for plan, verdict, needed in zip(self.plans, self.verdicts, self.estimates, strict=True):
            replicas.append(
                {
                    "node_id": plan.node_id,
                    "plan_digest": plan.digest,
                    "reservation": plan.limits.as_json(),
                    "available": None if verdict.available is None else verdict.available.as_json(),
                    "estimate": needed.in_full(),
                    "staging_bytes": 0,
                    "fits": verdict.fits,
                    "problems": [problem.as_json() for problem in verdict.problems],
                }
            )
        warnings = [
            warning.as_json()
            for warning in (*self.doubts, *(one for verdict in self.verdicts for one in verdict.warnings))
        ]
        return {
            "accepted": self.accepted,
            "preview_digest": self.preview_digest,
            "replicas": replicas,
            "warnings": warnings,
        }


class Planning:
    def __init__(self, context: Context, nodes: Nodes, estimates: Estimates) -> None:
        self._context = context
        self._nodes = nodes
        self._estimates = estimates

    def plan(self, connection: Connection, project_id: str, specification: Specification) -> Planned:
        model = model_rows.get(connection, project_id, specification.model_id)
        if model is None:
            raise Refused(
                "not_found", f"There is no model {specification.model_id} in this project.", "model_id"
            )
        if model.record.state is not acquisition.State.READY:
            why = "" if model.record.error is None else f" {model.record.error.message}"
            raise Refused(
                "model_not_ready",
                f"The model is {model.record.state}; a service starts from verified files only.{why}",
                "model_id",
            )
        adapter = registry.adapter(specification.engine)
        record = ModelRecord(model.id, model.revision, model.manifest)
        references = input_references(model.manifest)
        runtime = specification.runtime.to_domain()
        jobs = [adapter.job(specification, record, one, references) for one in specification.placements]
        plans = [
            job.plan(one.node_id, runtime) for job, one in zip(jobs, specification.placements, strict=True)
        ]
        estimates, doubts = self._estimates.of(model.manifest, specification)
        peak_bytes = peaks.highest(connection, project_id, peaks.Settings.of(model.revision, specification))
        if peak_bytes is not None:
            estimates = tuple(
                needed if one.limits.gpu_devices else estimate.with_measured(needed, peak_bytes)
                for needed, one in zip(estimates, specification.placements, strict=True)
            )
        nodes = self.node_views(connection, {plan.node_id for plan in plans})
        verdicts = placement.place(list(zip(plans, estimates, strict=True)), nodes)
        return Planned(specification, model, tuple(jobs), tuple(plans), tuple(verdicts), estimates, doubts)

    def node_views(self, connection: Connection, node_ids: set[str]) -> dict[str, placement.Node]:
        reserved = node_rows.reserved(connection, sorted(node_ids))
        found = {}
        for node_id in node_ids:
            row = node_rows.get(connection, node_id)
            if row is not None:
                link = self._nodes.link(node_id)
                snapshot = row.snapshot if link is None else link.snapshot  # the newest measurement
                found[node_id] = placement.Node(
                    id=node_id,
                    name=row.name,
                    connected=link is not None,
                    snapshot=None if snapshot is None else Snapshot.from_json(snapshot),
                    reserved=reserved[node_id],
                )
        return found

    def accepted(
        self, tx: Transaction, project_id: str, specification: Specification, preview_digest: str | None
    ) -> Planned:
        """The plans, none of them refused, with their nodes held until the transaction ends."""
        node_rows.lock(tx, sorted({one.node_id for one in specification.placements}))
        planned = self.plan(tx.connection, project_id, specification)
        if preview_digest is not None and preview_digest != planned.preview_digest:
            raise Refused(
                "preview_changed",
                "What would run differs from the preview that was accepted; look at the new one.",
                beside={"preview": planned.as_json()},
            )
        problems = [problem for verdict in planned.verdicts for problem in verdict.problems]
        if problems:
            raise Refused(
                "does_not_fit",
                " ".join(dict.fromkeys(problem.message for problem in problems)),
                details={"problems": [problem.as_json() for problem in problems]},
                beside={"preview": planned.as_json()},
            )
        self._hold_inputs(tx, project_id, planned)
        return planned

    def _hold_inputs(self, tx: Transaction, project_id: str, planned: Planned) -> None:
        """Before anything is written: an eviction at the same moment comes first, or finds the attempts."""
        digests = {entry.sha256 for plan in planned.plans for entry in plan.inputs}
        if not eviction.use(tx, project_id, digests, self._context.now()):
            raise Refused(
                "model_not_ready",
                "A file that the replicas would read is not there, verified; read the model again.",
                "model_id",
            )
