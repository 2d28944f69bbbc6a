"""The launcher's flags and what becomes of them. With a model it runs in the integration tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ficc.images import llama_server

LAUNCHER = Path(llama_server.__file__)
EVERY_FLAG = (
    "--model /m.gguf --alias assistant --host /run/e.sock --port 0 --ctx-size 8192 --parallel 2 --threads 3"
    " --threads-batch 4 --threads-http 5 --batch-size 256 --ubatch-size 128 --n-gpu-layers all"
    " --tensor-split 3,1 --split-mode row --embeddings --pooling mean --sse-ping-interval 7 --no-webui"
    " --no-slots --timeout 90 --jinja --cache-type-k q8_0 --cache-type-v q4_0 --n-predict 64"
)


def run(*arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, LAUNCHER, *arguments], capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--model"],
        ["--model", "m", "--verbose"],
        ["--model", "m", "--ctx", "1"],  # no abbreviations
        ["--model", "m", "positional"],
        ["--model", "m", "--pooling", "max"],
        ["--model", "m", "--n-gpu-layers", "some"],
        ["--model", "m", "--n-gpu-layers", "-1"],
        ["--model", "m", "--tensor-split", "1,x"],
        ["--model", "m", "--tensor-split", "0,0"],
        ["--model", "m", "--tensor-split", "nan"],
        ["--model", "m", "--parallel", "0"],
        ["--model", "m", "--port", "70000"],
        ["--model", "m", "--cache-type-k", "q2_k"],
        ["--model", "m", "--split-mode", "tensor"],
        ["--help"],
    ],
)
def test_other_flags_and_values_are_wrong_usage(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: llama-server --model MODEL")
    assert done.stdout == ""


def test_every_flag_reaches_the_engine() -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    options = llama_server.parser().parse_args(EVERY_FLAG.split())
    p = llama_server.parameters(xllamacpp, options)
    assert (p.model.path, p.model_alias, p.hostnames, p.port) == (
        "/m.gguf",
        {"assistant"},
        ["/run/e.sock"],
        0,
    )
    assert (p.n_ctx, p.n_parallel, p.n_batch, p.n_ubatch, p.n_predict) == (8192, 2, 256, 128, 64)
    assert (p.cpuparams.n_threads, p.cpuparams_batch.n_threads, p.n_threads_http) == (3, 4, 5)
    assert (p.n_gpu_layers, p.no_kv_offload, p.no_op_offload) == (-2, False, False)
    assert p.split_mode == xllamacpp.llama_split_mode.LLAMA_SPLIT_MODE_ROW
    assert (p.tensor_split[:3], sum(p.tensor_split)) == ([3.0, 1.0, 0.0], 4.0)
    assert (p.embedding, p.pooling_type) == (True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN)
    assert (p.sse_ping_interval, p.timeout_read, p.timeout_write) == (7, 90, 90)
    assert p.cache_type_k == xllamacpp.ggml_type.GGML_TYPE_Q8_0
    assert p.cache_type_v == xllamacpp.ggml_type.GGML_TYPE_Q4_0


def test_what_is_not_asked_for_stays_off() -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    p = llama_server.parameters(xllamacpp, llama_server.parser().parse_args(["--model", "m"]))
    assert (p.n_gpu_layers, p.no_kv_offload, p.no_op_offload) == (0, True, True)
    assert (p.fit_params, p.ui, p.endpoint_slots, p.embedding, p.cache_ram_mib) == (False,) * 4 + (0,)
    assert p.cpuparams.n_threads == p.cpuparams_batch.n_threads == len(os.sched_getaffinity(0))


def test_too_many_weights_end_the_start(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    done = run("--model", str(tmp_path / "m"), "--tensor-split", ",".join(["1"] * 1000))
    assert done.returncode == 1
    assert "--tensor-split names more than" in done.stderr


def test_only_a_socket_is_removed_before_listening(tmp_path: Path) -> None:
    stale = tmp_path / "e.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(stale))
    llama_server.remove_stale_socket(str(stale))
    assert not stale.exists()
    llama_server.remove_stale_socket(str(stale))
    stale.write_text("somebody's file")
    llama_server.remove_stale_socket(str(stale))
    assert stale.read_text() == "somebody's file"


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("os._exit(1)", 1, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV, "killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "killed by SIGKILL"),
    ],
)
def test_how_the_engine_ended_is_how_the_launcher_ends(end: str, status: int, says: str) -> None:
    code = (
        "import os, signal, sys; from ficc.images import llama_server\n"
        f"llama_server.serve = lambda options: {end}\n"
        "sys.exit(llama_server.main(['--model', 'm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == status
    assert says in done.stderr
