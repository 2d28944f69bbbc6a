"""llama.cpp's server, over a unix socket in the sandbox.

Source of the flags: the manual of `llama-server` (llama.cpp, tools/server/README.md). `--ctx-size` is the
total over all slots, so it is context times concurrency; `--alias` makes the engine answer under the
service's name, so that no chunk has to be rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from ficc.domain.errors import Refused, invalid
from ficc.domain.estimate import BATCH_TOKENS, EMBEDDING_BATCH_TOKENS_MAX
from ficc.domain.plan import BODY_BYTES_MAX, Endpoint, Input
from ficc.inference.contract import Job, ModelRecord, Probe
from ficc.inference.schema import Placement, Specification

SOCKET = "/run/ficc/engine.sock"
SSE_PING_SECONDS = 15
SPARE_HTTP_THREADS = 2
CONCURRENCY_MAX = 256
"""LLAMA_MAX_SEQ: the engine starts with no more slots."""
CONTEXT_TOTAL_MAX = 1 << 30
"""Tokens over all slots; the engine counts them in 32 bits with a sign."""
THREADS_MAX = 512
"""GGML_MAX_N_THREADS."""

HEALTH = ("GET", "/health")
"""Answered by the HTTP server beside the slots; SPARE_HTTP_THREADS keeps a thread free for it."""
_ROUTES = {
    "chat": ("POST", "/v1/chat/completions"),
    "completions": ("POST", "/v1/completions"),
    "embeddings": ("POST", "/v1/embeddings"),
    "rerank": ("POST", "/v1/rerank"),
}
_GENERATES = frozenset({"chat", "completions"})


class LlamaCpp:
    API_VERSION = 1

    def job(
        self,
        specification: Specification,
        model_record: ModelRecord,
        placement: Placement,
        immutable_input_references: Sequence[Input],
    ) -> Job:
        """One `llama-server`. Raises Refused for another format, for a model that declares nothing it can
        be asked for, for more slots or context than the engine has, for tensor or pipeline parallelism
        (use tensor_split), for GPU options without GPUs and for a split of another length."""
        _check(specification, model_record, placement)
        manifest = model_record.manifest
        capabilities = manifest.served_capabilities
        return Job(
            argv=(
                specification.executable,
                *("--model", f"/inputs/{manifest.entry.name}"),
                *("--alias", specification.alias),
                *("--host", SOCKET),
                *("--ctx-size", str(specification.context * specification.concurrency)),
                *("--parallel", str(specification.concurrency)),
                *("--threads", str(_threads(placement))),
                *("--threads-http", str(specification.concurrency + SPARE_HTTP_THREADS)),
                *("--sse-ping-interval", str(SSE_PING_SECONDS)),
                *("--n-gpu-layers", _gpu_layers(specification, placement)),
                *_tensor_split(specification),
                *_embedding_flags(capabilities, specification.context, specification.concurrency),
                "--no-webui",
                "--no-slots",
            ),
            environment={"HOME": "/tmp", "LANG": "C.UTF-8"},  # noqa: S108  # the sandbox's own /tmp
            limits=placement.limits.to_domain(),
            inputs=tuple(immutable_input_references),
            endpoint=Endpoint(
                transport="unix",
                path_or_port=SOCKET,
                routes=(*(_ROUTES[capability] for capability in capabilities), HEALTH),
                body_bytes_max=BODY_BYTES_MAX,
                concurrency=specification.concurrency,
            ),
            readiness=_readiness(capabilities, specification.alias),
            model_revision=model_record.revision,
        )


def _check(specification: Specification, model: ModelRecord, placement: Placement) -> None:
    if model.manifest.format != "gguf":
        raise invalid(f"llama_cpp runs gguf models; this one is {model.manifest.format}.", "engine")
    if not model.manifest.served_capabilities:
        raise Refused(
            "capability_unavailable",
            "The model was registered without any capability; register it with chat or embeddings.",
            "model_id",
        )
    if "rerank" in model.manifest.served_capabilities and len(model.manifest.served_capabilities) > 1:
        raise Refused(
            "capability_unavailable",
            "llama_cpp ranks with a pooling that leaves nothing else; register the model for rerank alone.",
            "model_id",
        )
    if specification.concurrency > CONCURRENCY_MAX:
        raise invalid(f"llama_cpp takes at most {CONCURRENCY_MAX} requests at once.", "concurrency")
    if specification.context * specification.concurrency > CONTEXT_TOTAL_MAX:
        raise invalid(
            f"context times concurrency is at most {CONTEXT_TOTAL_MAX} tokens with llama_cpp.", "context"
        )
    if specification.parallelism is not None:
        raise invalid("llama_cpp splits over GPUs by tensor_split; leave parallelism out.", "parallelism")
    gpus = len(placement.limits.gpu_devices)
    if not gpus and specification.gpu_layers not in (None, 0):
        raise Refused(
            "invalid_request",
            "gpu_layers needs GPUs: name them in each placement's limits.gpu_devices. Nothing falls back to CPU.",
            "gpu_layers",
        )
    if specification.tensor_split is not None:
        if len(specification.tensor_split) != gpus:
            raise invalid(f"tensor_split has one weight per GPU of a placement; here {gpus}.", "tensor_split")
        if not any(specification.tensor_split):
            raise invalid("At least one weight of tensor_split is above 0.", "tensor_split")


def _threads(placement: Placement) -> int:
    """As many as there are whole cores to run them on, at least one."""
    return min(THREADS_MAX, max(1, placement.limits.cpu_millis // 1000))


def _gpu_layers(specification: Specification, placement: Placement) -> str:
    if not placement.limits.gpu_devices:
        return "0"
    return "all" if specification.gpu_layers is None else str(specification.gpu_layers)


def _tensor_split(specification: Specification) -> tuple[str, ...]:
    if specification.tensor_split is None:
        return ()
    return ("--tensor-split", ",".join(map(str, specification.tensor_split)))


def _embedding_flags(capabilities: Sequence[str], context: int, concurrency: int) -> tuple[str, ...]:
    """A chat model has no pooling of its own, and /v1/embeddings needs one: the mean over its tokens.
    A model made for embeddings declares its pooling in its header, and takes inputs as long as its context:
    the engine embeds, and ranks, an input in one physical batch or not at all. (A chat model keeps the engine's own
    batch, since its memory grows by the whole vocabulary with each token of it.) The engine divides a batch
    among its slots, and aborts while it loads when that leaves a remainder."""
    ranks = "rerank" in capabilities
    if not ranks and "embeddings" not in capabilities:
        return ()
    generates = not _GENERATES.isdisjoint(capabilities)
    pooling = ("--pooling", "mean" if generates else "rank") if generates or ranks else ()
    if generates and BATCH_TOKENS % concurrency == 0:
        return ("--embeddings", *pooling)
    wanted = BATCH_TOKENS if generates else min(context, EMBEDDING_BATCH_TOKENS_MAX)
    batch = str(-(-wanted // concurrency) * concurrency)
    return ("--embeddings", *pooling, "--batch-size", batch, "--ubatch-size", batch)


def _readiness(capabilities: Sequence[str], alias: str) -> Probe:
    if "chat" in capabilities:
        body = {"model": alias, "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
        return Probe("/v1/chat/completions", body)
    if "completions" in capabilities:
        return Probe("/v1/completions", {"model": alias, "prompt": ".", "max_tokens": 1})
    if "rerank" in capabilities:
        return Probe("/v1/rerank", {"model": alias, "query": ".", "documents": ["."]})
    return Probe("/v1/embeddings", {"model": alias, "input": "."})
