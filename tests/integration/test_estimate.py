"""Estimates against the real engine: the resident memory of its processes with a real model, and its own
account of its buffers with tiny models of other kinds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ficc.domain import estimate as estimates
from ficc.domain.estimate import CACHE_TYPES, from_shape
from ficc.domain.manifest import Capability
from ficc.domain.model_shape import ModelShape
from ficc.images import llama_server
from ficc.protocol.gguf import Reader
from support import gguf_files, scripts
from support.gguf_files import Tensor

GROWTH_ERROR_MAX = 0.05
TOTAL_ERROR_MAX = 0.15
MIB = 1 << 20
CONCURRENCY = 2
CONTEXTS = (512, 1024, 4096)
"""Tokens per request, so twice as many over both slots."""
PROMPT_TOKENS = 504
"""One batch: whatever a batch needs becomes resident, the same in each context. Only the masks stay partly
unused; to fill a context takes minutes (`scripts/estimates.py` does that)."""

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
needs_image = pytest.mark.skipif(
    shutil.which("bwrap") is None or shutil.which("mmdebstrap") is None,
    reason="bubblewrap or mmdebstrap is not installed",
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.load("estimates")


@needs_image
def test_the_real_models_memory_is_as_predicted(script: ModuleType, images: Path, model_file: Path) -> None:
    image = script.image_root(images.parent)
    predicted, measured = [], []
    for context in CONTEXTS:
        case = script.Case(context, CONCURRENCY)
        predicted.append(script.predict(model_file, case).total_bytes)
        measured.append(
            script.measure(image, model_file, case, prompt_tokens=PROMPT_TOKENS, prompts=1).peak_bytes
        )
    for estimate, peak in zip(predicted, measured, strict=True):
        assert estimate == pytest.approx(peak, rel=TOTAL_ERROR_MAX)
    for number in range(1, len(CONTEXTS)):
        growth = measured[number] - measured[0]
        assert predicted[number] - predicted[0] == pytest.approx(growth, rel=GROWTH_ERROR_MAX)


@needs_image
def test_embeddings_of_a_chat_model_cost_what_is_predicted(
    script: ModuleType, images: Path, model_file: Path
) -> None:
    case = script.Case(512, 1, ("chat", "embeddings"))
    peak = script.measure(script.image_root(images.parent), model_file, case, prompt_tokens=500).peak_bytes
    assert script.predict(model_file, case).total_bytes == pytest.approx(peak, rel=TOTAL_ERROR_MAX)


# The engine's own account.

ACCOUNT = """
import sys, time
import xllamacpp
from ficc.images import llama_server
options = llama_server.parser().parse_args(sys.argv[1:])
parameters = llama_server.parameters(xllamacpp, options)
parameters.verbosity = 4
server = xllamacpp.Server(parameters)
time.sleep(600)
"""
LISTENING = b"listening on"
"""It stands behind the buffers in the log, which the engine writes from a thread of its own."""


def account(folder: Path, made: tuple[dict[str, Any], list[Tensor]], *flags: str) -> dict[str, float]:
    """The engine's buffers in MiB, by kind, as its log says them."""
    model = gguf_files.write(folder / "m.gguf", *made)
    command = [sys.executable, "-c", ACCOUNT, "--model", str(model), "--host", str(folder / "e.sock")]
    lines = []
    with subprocess.Popen(
        [*command, "--port", "0", "--threads", "1", *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as engine:
        assert engine.stdout is not None
        try:
            for line in engine.stdout:
                lines.append(line)
                if LISTENING in line:
                    break
        finally:
            engine.kill()
    log = b"".join(lines).decode(errors="replace")
    found: dict[str, float] = {"KV": 0.0, "RS": 0.0, "compute": 0.0}
    for kind, size in re.findall(r"CPU (KV|RS|compute) buffer size = +([0-9.]+) MiB", log):
        found[kind] += float(size)
    assert found["compute"], log[-2000:]
    return found


def shape_of(made: tuple[dict[str, Any], list[Tensor]]) -> ModelShape:
    reader = Reader()
    reader.feed(gguf_files.header(*made))
    shape = reader.end().shape
    assert shape is not None
    return shape


MODELS = {
    "llama": gguf_files.tiny_llama(),
    "llama, other heads": gguf_files.tiny_llama(layers=3, width=128, heads=8, heads_kv=1, forward=512),
    "a window": gguf_files.tiny_gemma3(),
    "latent attention": gguf_files.tiny_deepseek2(),
    "recurrent": gguf_files.tiny_mamba(),
    "an encoder": gguf_files.tiny_bert(),
}


@pytest.mark.parametrize(("context", "concurrency"), [(2048, 1), (1000, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_makes_the_buffers_that_are_predicted(
    tmp_path: Path, name: str, context: int, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the snapshots, which it makes while it runs."""
    monkeypatch.setattr(estimates, "SNAPSHOTS_MAX", 0)
    made = MODELS[name]
    shape = shape_of(made)
    capabilities: tuple[Capability, ...] = ("embeddings",) if shape.is_encoder else ("chat",)
    estimate = from_shape(shape, 0, context=context, concurrency=concurrency, capabilities=capabilities)
    batch = ("--embeddings", "--batch-size", str(context), "--ubatch-size", str(context))
    flags = batch if shape.is_encoder else ()
    total = str(context * concurrency)
    found = account(tmp_path, made, "--ctx-size", total, "--parallel", str(concurrency), *flags)
    assert estimate.kv_cache_bytes is not None
    assert estimate.compute_bytes is not None
    assert estimate.kv_cache_bytes / MIB == pytest.approx(found["KV"] + found["RS"], abs=0.02)
    assert 0.98 * found["compute"] <= estimate.compute_bytes / MIB <= 2 * found["compute"]


@pytest.mark.parametrize("cache_type", [name for name in CACHE_TYPES if name != "f16"])
def test_every_cache_type_has_the_size_that_is_predicted(tmp_path: Path, cache_type: str) -> None:
    made = gguf_files.tiny_llama(layers=2, width=128, heads=2, heads_kv=2)
    assert cache_type in llama_server.CACHE_TYPES
    flags = ("--cache-type-k", cache_type, "--cache-type-v", cache_type)
    found = account(tmp_path, made, "--ctx-size", "4096", *flags)
    estimate = from_shape(
        shape_of(made), 0, context=4096, concurrency=1, cache_type_k=cache_type, cache_type_v=cache_type
    )
    assert estimate.kv_cache_bytes is not None
    assert estimate.kv_cache_bytes / MIB == pytest.approx(found["KV"], abs=0.02)
