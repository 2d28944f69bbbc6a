#!/usr/bin/python3 -IB
"""`llama-server` of the runtime image: llama.cpp's own HTTP server, out of the wheel `xllamacpp`.

This file is copied into the image as `/opt/engine/bin/llama-server`, so it may use the standard library
and `xllamacpp` only. It takes the flags of the real `llama-server` that an adapter needs, with the same
meaning, and refuses all others (status 2), so that a flag never silently does nothing.

Two processes: the engine, and a small parent that waits for signals. Loading a model holds the
interpreter's lock for as long as it takes (minutes for a large one), so the loading process could not
answer SIGTERM by itself; and a crash inside the engine becomes a line on standard error and a status.

Exit status: 0 after SIGTERM or SIGINT, 1 when the engine could not start, 2 for wrong usage, 128 + N
when the engine was killed by signal N.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ENGINE_LIBRARY = Path(__file__).resolve().parent.parent / "lib"
SOCKET_SUFFIX = ".sock"

ALL_LAYERS = -2  # how llama.cpp writes "all"; -1 would let it choose
SPLIT_MODES = ("none", "layer", "row")
POOLINGS = ("none", "mean", "cls", "last", "rank")
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    remove_stale_socket(options.host)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    waited = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    parent = os.getpid()
    engine = os.fork()
    if engine == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the parent decides
        die_with(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
        serve(options)
    try:
        return supervise(engine, waited)
    finally:
        remove_stale_socket(options.host)


def supervise(engine: int, waited: set[signal.Signals]) -> int:
    """Waits for the engine's end or for the signal to end it; the exit status."""
    while True:
        if signal.sigwait(waited) != signal.SIGCHLD:
            os.kill(engine, signal.SIGKILL)  # it holds nothing that outlives it
            os.waitpid(engine, 0)
            return 0
        ended, status = os.waitpid(engine, os.WNOHANG)
        if ended and os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            print(f"llama-server: the engine was killed by {name}", file=sys.stderr, flush=True)
            return 128 + os.WTERMSIG(status)
        if ended:
            return os.WEXITSTATUS(status)


def serve(options: argparse.Namespace) -> NoReturn:
    """The engine's process: loads the model, then leaves the work to the engine's own threads.

    Leaves through `os._exit`, because the engine's threads outlive the interpreter's shutdown.
    """
    if ENGINE_LIBRARY.is_dir():
        sys.path.insert(0, str(ENGINE_LIBRARY))
    try:
        import xllamacpp

        server = xllamacpp.Server(parameters(xllamacpp, options))
    except (ImportError, RuntimeError) as failure:  # what went wrong is in the engine's lines above
        print(f"llama-server: the engine did not start: {failure}", file=sys.stderr, flush=True)
        os._exit(1)
    print(f"llama-server: ready on {server.listening_address}", file=sys.stderr, flush=True)
    while True:
        signal.pause()


def parameters(xllamacpp: Any, options: argparse.Namespace) -> Any:
    """The engine's parameters.

    `fit_params` is off: it would change context and offloaded layers behind the specification's back.
    `cache_ram_mib` is 0: the default keeps up to 8 GiB of old prompts, more than a sandbox's limit.
    """
    p = xllamacpp.CommonParams()
    p.model.path = options.model
    if options.alias:
        p.model_alias = {options.alias}
    p.hostnames = [options.host]
    p.port = options.port
    p.timeout_read = p.timeout_write = options.timeout
    p.n_threads_http = options.threads_http
    p.sse_ping_interval = options.sse_ping_interval
    p.ui = p.endpoint_slots = p.fit_params = False
    p.cache_ram_mib = 0
    p.use_jinja = True

    p.n_ctx = options.ctx_size
    p.n_parallel = options.parallel
    p.n_batch, p.n_ubatch = options.batch_size, options.ubatch_size
    p.n_predict = options.n_predict
    p.cache_type_k = cache_type(xllamacpp, options.cache_type_k)
    p.cache_type_v = cache_type(xllamacpp, options.cache_type_v)
    p.cpuparams.n_threads = options.threads or len(os.sched_getaffinity(0))
    p.cpuparams_batch.n_threads = options.threads_batch or p.cpuparams.n_threads

    p.n_gpu_layers = options.n_gpu_layers
    p.no_kv_offload = p.no_op_offload = options.n_gpu_layers == 0
    p.split_mode = getattr(xllamacpp.llama_split_mode, f"LLAMA_SPLIT_MODE_{options.split_mode.upper()}")
    if options.tensor_split:
        devices_max = len(p.tensor_split)
        if len(options.tensor_split) > devices_max:
            raise RuntimeError(f"--tensor-split names more than {devices_max} devices")
        p.tensor_split = options.tensor_split + [0.0] * (devices_max - len(options.tensor_split))

    p.embedding = options.embeddings
    if options.pooling:
        p.pooling_type = getattr(
            xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{options.pooling.upper()}"
        )
    return p


def cache_type(xllamacpp: Any, name: str) -> Any:
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")


def parser() -> argparse.ArgumentParser:
    """The accepted flags; names and meanings as llama.cpp's `tools/server/README.md` has them."""
    p = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False, add_help=False)
    p.add_argument("--model", required=True)
    p.add_argument("--alias", default="")
    p.add_argument(
        "--host", default="127.0.0.1", help=f"address; a path ending in {SOCKET_SUFFIX} is a socket"
    )
    p.add_argument("--port", type=between(0, 65535), default=8080)
    p.add_argument("--timeout", type=between(1, 86400), default=3600, help="seconds, reading and writing")
    p.add_argument("--sse-ping-interval", type=between(-1, 86400), default=30, help="seconds; -1: never")
    p.add_argument("--threads-http", type=between(-1, 4096), default=-1)
    p.add_argument("--ctx-size", type=between(0, 1 << 30), default=0, help="over all slots; 0: the model's")
    p.add_argument("--parallel", type=between(1, 256), default=1, help="slots")
    p.add_argument("--threads", type=between(1, 512), help="default: the processors it may run on")
    p.add_argument("--threads-batch", type=between(1, 512), help="default: as --threads")
    p.add_argument("--batch-size", type=between(1, 1 << 20), default=2048)
    p.add_argument("--ubatch-size", type=between(1, 1 << 20), default=512)
    p.add_argument("--n-predict", type=between(-1, 1 << 30), default=-1, help="-1: until the context is full")
    p.add_argument("--cache-type-k", choices=CACHE_TYPES, default="f16")
    p.add_argument("--cache-type-v", choices=CACHE_TYPES, default="f16")
    p.add_argument("--n-gpu-layers", type=layers, default=0, help='a number or "all"')
    p.add_argument("--split-mode", choices=SPLIT_MODES, default="layer")
    p.add_argument("--tensor-split", type=weights, help="one weight per GPU, separated by commas")
    p.add_argument("--embeddings", action="store_true")
    p.add_argument("--pooling", choices=POOLINGS)
    for always_so in ("--jinja", "--no-webui", "--no-slots"):
        p.add_argument(always_so, action="store_true", help="accepted; this launcher has it no other way")
    return p


def between(least: int, most: int) -> Any:
    def integer(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return integer


def layers(text: str) -> int:
    return ALL_LAYERS if text == "all" else between(0, 1 << 20)(text)


def weights(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value < float("inf") for value in values) or not any(values):
        raise argparse.ArgumentTypeError("weights are finite, not negative and not all zero")
    return values


def remove_stale_socket(host: str) -> None:
    """A socket file left by an earlier run would make listening fail. Nothing but a socket is removed."""
    if not host.endswith(SOCKET_SUFFIX):
        return
    try:
        if stat.S_ISSOCK(os.lstat(host).st_mode):
            os.unlink(host)
    except FileNotFoundError:
        pass


def die_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
