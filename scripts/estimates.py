"""Predicted and measured memory: runs the real engine in its image, as the llama_cpp adapter starts it, and
writes the table of docs/memory-estimate.md. It takes some minutes, since every context is filled.

    python scripts/estimates.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ficc.domain.estimate import Estimate, from_shape
from ficc.domain.manifest import Capability, File, Manifest
from ficc.images.build import LLAMA_SERVER, build_llama_cpp
from ficc.images.store import ImageStore
from ficc.inference.adapters.llama_cpp import SOCKET, LlamaCpp
from ficc.inference.contract import ModelRecord, input_references
from ficc.inference.schema import Specification
from ficc.protocol.gguf import Header, Reader

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "memory-estimate.md"
MARKS = ("<!-- table: begin -->\n", "<!-- table: end -->\n")
READY_SECONDS_MAX = 120
ANSWER_SECONDS_MAX = 1800
ACCOUNT = 65534
SPARE_TOKENS = 8
"""Left free in a slot for the answer."""
MB = 1_000_000


class Case(NamedTuple):
    """Tokens per request, requests at once, and what the service offers."""

    context: int
    concurrency: int
    capabilities: tuple[Capability, ...] = ("chat",)


CASES = (Case(512, 1), Case(2048, 1), Case(8192, 1), Case(2048, 4), Case(2048, 1, ("chat", "embeddings")))


@dataclass(frozen=True)
class Measured:
    """Resident memory of launcher and engine: once loaded, and at its highest after the prompts."""

    loaded_bytes: int
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "runtime-image")
    arguments = parser.parse_args()
    image = image_root(arguments.cache)
    rows = []
    for case in CASES:
        measured = measure(image, arguments.model, case, prompt_tokens=case.context - SPARE_TOKENS)
        rows.append((case, predict(arguments.model, case), measured))
        print(row(*rows[-1]), end="", flush=True)
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(before + MARKS[0] + table(rows) + MARKS[1] + after)


def table(rows: Sequence[tuple[Case, Estimate, Measured]]) -> str:
    """Amounts in MB (10^6 bytes)."""
    head = (
        "| context | at once | offers | weights | cache | compute | engine | predicted | measured | difference |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n"
    )
    growth = [
        f"\nGrowth from a context of {rows[0][0].context} to {case.context}: predicted "
        f"{(estimate.total_bytes - rows[0][1].total_bytes) / MB:.1f} MB, measured "
        f"{(measured.peak_bytes - rows[0][2].peak_bytes) / MB:.1f} MB.\n"
        for case, estimate, measured in rows[1:]
        if case.concurrency == 1 and case.capabilities == ("chat",)
    ]
    return head + "".join(row(*each) for each in rows) + "".join(growth)


def row(case: Case, estimate: Estimate, measured: Measured) -> str:
    terms = (
        estimate.weights_bytes,
        estimate.kv_cache_bytes or 0,
        estimate.compute_bytes or 0,
        estimate.overhead_bytes,
        estimate.total_bytes,
        measured.peak_bytes,
    )
    difference = estimate.total_bytes / measured.peak_bytes - 1
    cells = [str(case.context), str(case.concurrency), ", ".join(case.capabilities)]
    cells += [f"{term / MB:.1f}" for term in terms]
    return f"| {' | '.join(cells)} | {difference:+.1%} |\n"


def header_of(model: Path) -> Header:
    reader = Reader(file_bytes=model.stat().st_size)
    with model.open("rb") as file:
        while not reader.done:
            reader.feed(file.read(max(reader.need, 1 << 16)))
    return reader.end()


def predict(model: Path, case: Case) -> Estimate:
    shape = header_of(model).shape
    if shape is None:
        raise SystemExit(f"{model} describes no model.")
    return from_shape(
        shape,
        model.stat().st_size,
        context=case.context,
        concurrency=case.concurrency,
        capabilities=case.capabilities,
    )


def image_root(cache: Path) -> Path:
    store = ImageStore(cache / "store")
    record = build_llama_cpp(store, work_dir=cache / "work", cache_dir=cache, progress=print)
    return store.root_of(record.image_digest)


# The engine.


def measure(
    image: Path, model: Path, case: Case, *, prompt_tokens: int, prompts: int | None = None
) -> Measured:
    """Starts the engine in a sandbox, gives it prompts of so many tokens at once (by default one for each
    slot), and reads the peak."""
    with tempfile.TemporaryDirectory() as run, _engine(image, model, case, Path(run)) as launcher:
        engine = int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])
        loaded = _status(engine, "VmRSS") + _private(launcher)
        path = str(Path(run) / Path(SOCKET).name)
        for capability in case.capabilities:
            _ask(path, capability, prompts or case.concurrency, prompt_tokens)
        return Measured(loaded, _status(engine, "VmHWM") + _private(launcher))


@contextlib.contextmanager
def _engine(image: Path, model: Path, case: Case, run: Path) -> Iterator[int]:
    """The launcher's process id, once the engine is ready."""
    run.chmod(0o777)
    read_end, write_end = os.pipe()
    command = [
        *("bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--ro-bind", str(image), "/"),
        *(
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/tmp",
            "--uid",
            str(ACCOUNT),
            "--gid",
            str(ACCOUNT),
        ),
        *("--ro-bind", str(model.resolve().parent), "/inputs", "--bind", str(run), str(Path(SOCKET).parent)),
        *("--as-pid-1", "--info-fd", str(write_end), *arguments(model.name, case)),
    ]
    with (run / "log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=[write_end], stdout=log, stderr=log)
    os.close(write_end)
    try:
        with os.fdopen(read_end) as info:
            launcher = int(json.load(info)["child-pid"])
        _wait_ready(process, str(run / Path(SOCKET).name), run / "log")
        yield launcher
    finally:
        process.kill()  # the sandbox dies with it
        process.wait()


def arguments(file: str, case: Case) -> tuple[str, ...]:
    """The command line that the adapter makes of a service with these settings. One thread: the engine's threads
    spin while they wait for one another, which on a busy machine takes minutes and changes no buffer."""
    manifest = Manifest("m", "gguf", (File(file, 1, "0" * 64),), case.capabilities)
    limits = {"cpu_millis": 1000, "memory_bytes": 1 << 40}
    runtime = {"provider": "bubblewrap", "package_digest": "0" * 64, "image_digest": "sha256:" + "0" * 64}
    specification = Specification.model_validate(
        {
            "alias": "measured",
            "model_id": "0" * 26,
            "engine": "llama_cpp",
            "runtime": runtime,
            "executable": LLAMA_SERVER,
            "context": case.context,
            "concurrency": case.concurrency,
            "placements": [{"node_id": "0" * 26, "limits": limits}],
        }
    )
    record = ModelRecord("0" * 26, manifest.revision, manifest)
    job = LlamaCpp().job(specification, record, specification.placements[0], input_references(manifest))
    return job.argv


def _wait_ready(process: subprocess.Popen[bytes], path: str, log: Path) -> None:
    until = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            if _call(path, "GET", "/health") == 200:
                return
        time.sleep(0.05)
    raise RuntimeError(f"The engine did not become ready:\n{log.read_text()[-3000:]}")


def _ask(path: str, capability: str, prompts: int, prompt_tokens: int) -> None:
    """At the same time; each prompt begins otherwise, so that none takes up another's slot."""
    answers: list[int] = []

    def ask(number: int) -> None:
        tokens = [number + 100] + [50] * (prompt_tokens - 1)
        if capability == "embeddings":
            body: dict[str, Any] = {"input": tokens[:500]}  # one physical batch takes no more
            answers.append(_call(path, "POST", "/v1/embeddings", body))
        else:
            answers.append(_call(path, "POST", "/v1/completions", {"prompt": tokens, "max_tokens": 4}))

    threads = [threading.Thread(target=ask, args=[number]) for number in range(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if answers != [200] * prompts:
        raise RuntimeError(f"The engine answered {answers}.")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_SECONDS_MAX)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _call(path: str, method: str, route: str, body: dict[str, Any] | None = None) -> int:
    with contextlib.closing(_Connection(path)) as connection:
        sent = None if body is None else json.dumps(body)
        connection.request(method, route, sent, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status


def _status(pid: int, name: str) -> int:
    """A size of /proc/PID/status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"Process {pid} shows no {name}.")
    return int(found[1]) * 1024


def _private(pid: int) -> int:
    """What the launcher has for itself: it shares the rest with the engine, which came out of it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    main()
