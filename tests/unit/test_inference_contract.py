"""What an adapter hands back becomes a plan, or is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ficc.domain.errors import Refused
from ficc.domain.plan import Endpoint, Input, Limits, Plan, Runtime
from ficc.inference.contract import Adapter, Job, Probe, input_references
from support.specifications import NODE, gguf

RUNTIME = Runtime("bubblewrap", "a" * 64, "sha256:" + "b" * 64)
JOB = Job(
    argv=("/opt/engine/bin/engine", "--flag"),
    environment={"HOME": "/tmp"},
    limits=Limits(1000, 1 << 30),
    inputs=(Input("model-0", "c" * 64, 10, "tiny.gguf"),),
    endpoint=Endpoint("unix", "/run/ficc/engine.sock", (("POST", "/v1/embeddings"),), 1024, 1),
    readiness=Probe("/v1/embeddings", {"input": "."}),
    model_revision="d" * 64,
)


def test_a_jobs_plan_says_all_that_runs() -> None:
    assert JOB.plan(NODE, RUNTIME) == Plan(
        node_id=NODE,
        runtime=RUNTIME,
        argv=JOB.argv,
        environment={"HOME": "/tmp"},
        limits=JOB.limits,
        inputs=JOB.inputs,
        outputs=(),
        sensitive=False,
        model_revision="d" * 64,
        endpoint=JOB.endpoint,
    )


def test_how_readiness_shows_is_no_part_of_the_plan() -> None:
    other = replace(JOB, readiness=Probe("/health", {}))
    assert other.plan(NODE, RUNTIME).digest == JOB.plan(NODE, RUNTIME).digest


def test_a_job_that_no_executor_launches_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        replace(JOB, argv=("engine",)).plan(NODE, RUNTIME)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "plan.argv")


def test_the_files_of_a_model_become_inputs_in_their_order() -> None:
    made = gguf(None, "b.gguf", "a.gguf")
    assert input_references(made) == (
        Input("model-0", f"{0:064x}", 10, "b.gguf"),
        Input("model-1", f"{1:064x}", 11, "a.gguf"),
    )


def test_an_adapter_is_known_by_its_shape() -> None:
    class Whole:
        API_VERSION = 1

        def job(self, specification, model_record, placement, immutable_input_references):  # type: ignore[no-untyped-def]
            return JOB

    class Versionless:
        def job(self) -> None: ...

    assert isinstance(Whole(), Adapter)
    assert not isinstance(Versionless(), Adapter)
