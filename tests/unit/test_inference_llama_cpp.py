"""The llama.cpp adapter: whole command lines, each understood by the launcher of our own image, and each
refusal."""

from __future__ import annotations

from typing import Any

import pytest

from ficc.domain.errors import Refused
from ficc.domain.manifest import Manifest
from ficc.domain.plan import Endpoint, Input
from ficc.images import llama_server
from ficc.inference.adapters.llama_cpp import LlamaCpp
from ficc.inference.contract import Adapter, Job, Probe, input_references
from ficc.inference.schema import Specification
from support.specifications import document, gguf, limits, record, specification

CHAT, EMBEDDINGS = ("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings")
COMPLETIONS, RERANK = ("POST", "/v1/completions"), ("POST", "/v1/rerank")
COMMON = "--alias assistant --host /run/ficc/engine.sock --ctx-size 16384 --parallel 4 --threads 2 --threads-http 6"


def job(made: Specification, model: Manifest) -> Job:
    return LlamaCpp().job(made, record(model), made.placements[0], input_references(model))


def refusal(model: Manifest | None = None, gpus: int = 0, **changes: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        job(specification(gpus, **changes), model or gguf(["chat"]))
    return caught.value


# Whole command lines.


@pytest.mark.parametrize(
    ("capabilities", "gpus", "changes", "rest"),
    [
        (None, 0, {}, "--n-gpu-layers 0"),
        (["chat"], 0, {"gpu_layers": 0}, "--n-gpu-layers 0"),
        (["chat", "embeddings"], 0, {}, "--n-gpu-layers 0 --embeddings --pooling mean"),
        (["embeddings"], 0, {}, "--n-gpu-layers 0 --embeddings --batch-size 4096 --ubatch-size 4096"),
        (["completions"], 0, {}, "--n-gpu-layers 0"),
        (["completions", "embeddings"], 0, {}, "--n-gpu-layers 0 --embeddings --pooling mean"),
        (
            ["rerank"],
            0,
            {},
            "--n-gpu-layers 0 --embeddings --pooling rank --batch-size 4096 --ubatch-size 4096",
        ),
        (["chat"], 1, {}, "--n-gpu-layers all"),
        (["chat"], 1, {"gpu_layers": "all"}, "--n-gpu-layers all"),
        (["chat"], 1, {"gpu_layers": 0}, "--n-gpu-layers 0"),
        (["chat"], 2, {"gpu_layers": 33, "tensor_split": [3, 1]}, "--n-gpu-layers 33 --tensor-split 3,1"),
        (["chat"], 2, {"tensor_split": [0, 1]}, "--n-gpu-layers all --tensor-split 0,1"),
    ],
)
def test_the_whole_command_line(
    capabilities: list[str] | None, gpus: int, changes: dict[str, Any], rest: str
) -> None:
    made = job(specification(gpus, **changes), gguf(capabilities, "d/tiny.gguf"))
    line = (
        f"/opt/engine/bin/llama-server --model /inputs/d/tiny.gguf {COMMON} --sse-ping-interval 15 {rest} "
        "--no-webui --no-slots"
    )
    assert list(made.argv) == line.split()
    understood = llama_server.parser().parse_args(made.argv[1:])
    assert understood.model == "/inputs/d/tiny.gguf"
    assert understood.ctx_size == 4 * 4096


@pytest.mark.parametrize(("context", "batch"), [(1, 4), (512, 512), (8192, 8192), (8193, 8192)])
def test_g25_an_input_for_embeddings_may_be_as_long_as_the_context(context: int, batch: int) -> None:
    made = job(specification(context=context), gguf(["embeddings"]))
    understood = llama_server.parser().parse_args(made.argv[1:])
    assert (understood.batch_size, understood.ubatch_size) == (batch, batch)


@pytest.mark.parametrize("capabilities", [["embeddings"], ["chat", "embeddings"]])
@pytest.mark.parametrize("concurrency", [1, 2, 3, 5, 7, 256])
@pytest.mark.parametrize("context", [1, 500, 1000, 4096])
def test_a_batch_is_divided_among_the_slots_without_a_remainder(
    capabilities: list[str], concurrency: int, context: int
) -> None:
    """Else the engine aborts while it loads (GGML_ASSERT, status 134)."""
    made = job(specification(context=context, concurrency=concurrency), gguf(capabilities))
    understood = llama_server.parser().parse_args(made.argv[1:])
    given = understood.ubatch_size or 512
    assert given % concurrency == 0
    assert given >= min(context, 512)


def test_the_executable_is_the_images() -> None:
    assert job(specification(executable="/usr/bin/server"), gguf()).argv[0] == "/usr/bin/server"


def test_a14_the_engine_is_pointed_at_the_first_shard() -> None:
    names = [f"big-0000{number}-of-00003.gguf" for number in (2, 3, 1)]
    made = job(specification(), gguf(None, *names))
    assert made.argv[2] == "/inputs/big-00001-of-00003.gguf"
    assert [entry.name for entry in made.inputs] == names


@pytest.mark.parametrize(
    ("cpu_millis", "threads"), [(10, 1), (999, 1), (1000, 1), (1999, 1), (2000, 2), (1_000_000, 512)]
)
def test_as_many_threads_as_whole_cores(cpu_millis: int, threads: int) -> None:
    placements = [{"node_id": "0" * 26, "limits": limits(cpu_millis=cpu_millis)}]
    made = job(Specification.model_validate(document(placements=placements)), gguf())
    assert made.argv[made.argv.index("--threads") + 1] == str(threads)
    llama_server.parser().parse_args(made.argv[1:])


# The rest of a job.


@pytest.mark.parametrize(
    ("capabilities", "routes"),
    [
        (None, (CHAT,)),
        (["embeddings"], (EMBEDDINGS,)),
        (["chat", "embeddings"], (CHAT, EMBEDDINGS)),
        (["embeddings", "chat"], (EMBEDDINGS, CHAT)),
        (["completions"], (COMPLETIONS,)),
        (["chat", "completions"], (CHAT, COMPLETIONS)),
        (["rerank"], (RERANK,)),
    ],
)
def test_the_endpoint_admits_what_was_declared_and_nothing_else(
    capabilities: list[str] | None, routes: tuple[tuple[str, str], ...]
) -> None:
    assert job(specification(), gguf(capabilities)).endpoint == Endpoint(
        transport="unix",
        path_or_port="/run/ficc/engine.sock",
        routes=(*routes, ("GET", "/health")),
        body_bytes_max=16 << 20,
        concurrency=4,
        upload_input_ids=(),
    )


@pytest.mark.parametrize(
    ("capabilities", "probe"),
    [
        (
            ["embeddings", "chat"],
            Probe(
                "/v1/chat/completions",
                {"model": "assistant", "messages": [{"role": "user", "content": "."}], "max_tokens": 1},
            ),
        ),
        (["embeddings"], Probe("/v1/embeddings", {"model": "assistant", "input": "."})),
        (["rerank"], Probe("/v1/rerank", {"model": "assistant", "query": ".", "documents": ["."]})),
        (
            ["completions", "embeddings"],
            Probe("/v1/completions", {"model": "assistant", "prompt": ".", "max_tokens": 1}),
        ),
    ],
)
def test_readiness_is_a_real_answer_over_a_route_of_the_contract(
    capabilities: list[str], probe: Probe
) -> None:
    made = job(specification(), gguf(capabilities))
    assert made.readiness == probe
    assert ("POST", probe.path) in made.endpoint.routes


def test_a_job_carries_the_model_and_the_limits_as_they_are() -> None:
    model = gguf(None, "tiny.gguf", "README.md")
    made = job(specification(), model)
    assert made.model_revision == model.revision
    assert made.inputs == (
        Input("model-0", f"{0:064x}", 10, "tiny.gguf"),
        Input("model-1", f"{1:064x}", 11, "README.md"),
    )
    assert made.limits == specification().placements[0].limits.to_domain()
    assert dict(made.environment) == {"HOME": "/tmp", "LANG": "C.UTF-8"}
    assert made.plan("0" * 26, specification().runtime.to_domain()).digest


def test_it_is_an_adapter_of_version_1() -> None:
    assert isinstance(LlamaCpp(), Adapter)
    assert LlamaCpp.API_VERSION == 1


# Refusals.


def test_another_format_is_refused() -> None:
    model = gguf(None, "model.safetensors", format="safetensors")
    refused = refusal(model)
    assert (refused.code, refused.param) == ("invalid_request", "engine")
    assert "safetensors" in refused.message


def test_a_model_without_any_capability_is_refused() -> None:
    refused = refusal(gguf([]))
    assert (refused.code, refused.param) == ("capability_unavailable", "model_id")


@pytest.mark.parametrize("parallelism", [{}, {"tensor": 2}, {"pipeline": 2}])
def test_parallelism_is_refused_for_tensor_split(parallelism: dict[str, int]) -> None:
    refused = refusal(gpus=2, parallelism=parallelism)
    assert refused.param == "parallelism"
    assert "tensor_split" in refused.message


@pytest.mark.parametrize("layers", [1, 99, "all"])
def test_l11_gpu_layers_without_gpus_are_refused_and_never_run_on_the_cpu(layers: int | str) -> None:
    refused = refusal(gpu_layers=layers)
    assert refused.param == "gpu_layers"
    assert "Nothing falls back to CPU" in refused.message


@pytest.mark.parametrize(("gpus", "split"), [(0, [1]), (1, [1, 1]), (2, [1]), (2, [1, 1, 1])])
def test_a_split_of_another_length_than_the_gpus_is_refused(gpus: int, split: list[int]) -> None:
    refused = refusal(gpus=gpus, tensor_split=split)
    assert refused.param == "tensor_split"
    assert f"here {gpus}" in refused.message


def test_a_split_that_gives_nobody_anything_is_refused() -> None:
    assert refusal(gpus=2, tensor_split=[0, 0]).param == "tensor_split"


def test_more_slots_than_the_engine_has_are_refused() -> None:
    assert job(specification(concurrency=256), gguf()).endpoint.concurrency == 256
    assert refusal(concurrency=257).param == "concurrency"


def test_more_context_than_the_engine_counts_is_refused() -> None:
    made = job(specification(context=1 << 24, concurrency=64), gguf())
    assert llama_server.parser().parse_args(made.argv[1:]).ctx_size == 1 << 30
    assert refusal(context=1 << 24, concurrency=65).param == "context"


@pytest.mark.parametrize("other", ["chat", "completions", "embeddings"])
def test_a_model_that_ranks_does_nothing_else(other: str) -> None:
    with pytest.raises(Refused) as caught:
        job(specification(), gguf(["rerank", other]))
    assert (caught.value.code, caught.value.param) == ("capability_unavailable", "model_id")
