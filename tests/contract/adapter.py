"""Engine adapters as anyone could ship them: `Scripted` for the engine beside this file, one whose engine is asked
whether it lives, and two that no release takes.

Installed as a distribution of its own (see `scripted.py`); nothing here is imported by the product otherwise.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ficc.domain.plan import Endpoint
from ficc.inference.contract import Job, Probe

SOCKET = "/run/ficc/engine.sock"
ROUTES = {
    "chat": ("POST", "/v1/chat/completions"),
    "completions": ("POST", "/v1/completions"),
    "embeddings": ("POST", "/v1/embeddings"),
    "rerank": ("POST", "/v1/rerank"),
}


class Scripted:
    API_VERSION = 1

    def job(self, *arguments: Any, **named: Any) -> Job:
        """Takes whatever it is called with and hands that to the engine, which tells it to who asks."""
        specification, model_record, placement, references = arguments
        call = {
            "positional": [type(argument).__name__ for argument in arguments],
            "named": sorted(named),
            "specification": specification.as_json(),
            "model": [model_record.id, model_record.revision, model_record.manifest.name],
            "placement": placement.model_dump(mode="json"),
            "inputs": [reference.as_json() for reference in references],
        }
        capabilities = model_record.manifest.served_capabilities
        body: dict[str, Any] = {"model": specification.alias}
        return Job(
            argv=(
                specification.executable,
                *("-IB", f"/inputs/{model_record.manifest.entry.name}", SOCKET),
            ),
            environment={"ADAPTER_CALL": json.dumps(call)},
            limits=placement.limits.to_domain(),
            inputs=tuple(references),
            endpoint=Endpoint(
                transport="unix",
                path_or_port=SOCKET,
                routes=tuple(ROUTES[capability] for capability in capabilities),
                body_bytes_max=1 << 20,
                concurrency=specification.concurrency,
            ),
            readiness=Probe(ROUTES[capabilities[0]][1], body),
            model_revision=model_record.revision,
        )


class Watched(Scripted):
    """With a route by which the executor asks whether the engine's process answers."""

    def job(self, *arguments: Any, **named: Any) -> Job:
        job = super().job(*arguments, **named)
        routes = (*job.endpoint.routes, ("GET", "/alive"))
        return replace(job, endpoint=replace(job.endpoint, routes=routes))


class OfAnotherVersion(Scripted):
    API_VERSION = 2


class WithoutAVersion:
    def job(self, *arguments: Any) -> Job:
        return Scripted().job(*arguments)
