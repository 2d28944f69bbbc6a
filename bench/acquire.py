"""The acquisition rows of the performance budget: from a source over TLS on loopback, against `curl` that writes the
same file and `sha256sum` that reads it back; and what other requests notice, against the same requests beside
processes that do nothing but keep every core busy."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench import lag
from bench.load import percentile, used
from bench.relay import table
from bench.setup import ROOT, Bench

BYTES = 2 << 30
FILES = 4
LOOK_SECONDS = 0.01
LOOKS_AT_HEALTH = 10
"""For each at the model."""
SPIN_SECONDS = 10.0
SPIN = "while True: pass"


async def acquisitions(bench: Bench) -> None:
    """One file for the throughput; then several at once for memory and for what other requests notice."""
    sys.path.insert(0, str(ROOT / "tests"))
    await asyncio.to_thread(_throughput, bench.directory / "one")
    await asyncio.to_thread(_at_once, bench.directory / "four")


def _throughput(folder: Path) -> None:
    with _source(folder / "source", BYTES, 1) as source, _controller(folder / "ficc", source) as registry:
        model = _register(registry, source["files"])
        began = time.perf_counter()
        registry.acquire(model)
        while registry.model(model)["state"] != "ready":
            time.sleep(0.05)
        ours = BYTES / (time.perf_counter() - began)

        copy = folder / "copy"
        began = time.perf_counter()
        fetch = ["curl", "--silent", "--show-error", "--cacert", source["ca_file"], "--output", str(copy)]
        subprocess.run([*fetch, source["files"][0]["url"]], check=True)
        subprocess.run(["sha256sum", str(copy)], check=True, capture_output=True)
        theirs = BYTES / (time.perf_counter() - began)
        copy.unlink()
    row: list[object] = [f"{ours / 1e6:.0f} MB/s", f"{theirs / 1e6:.0f} MB/s", f"{ours / theirs:.2f}"]
    table("Acquisition over TLS, 2 GiB", ["ficc", "curl, then sha256sum", "ratio"], [row])


def _at_once(folder: Path) -> None:
    size = BYTES // FILES
    with (
        _source(folder / "source", size, FILES) as source,
        _controller(folder / "ficc", source) as registry,
        _idle(folder / "idle") as idle,
    ):
        own = registry.directory / "lags"
        with ExitStack() as spinning:
            for _ in range(os.cpu_count() or 1):
                spinning.enter_context(_process([sys.executable, "-c", SPIN]))
            until = time.perf_counter() + SPIN_SECONDS
            rows = [_look("busy cores alone", registry, own, idle, lambda: time.perf_counter() < until)]
        model = _register(registry, source["files"])
        registry.acquire(model)
        rows.append(
            _look(f"{FILES} files", registry, own, idle, lambda: registry.model(model)["state"] != "ready")
        )
    columns = ["while", "loop p50", "loop p99", "idle process p99", "/health p50", "/health p99", "growth"]
    table("What others notice of files that are fetched at once", columns, rows)


def _look(what: str, registry: Any, own: Path, idle: Path, goes_on: Callable[[], bool]) -> list[object]:
    """Requests one after the other while something goes on, and how late the loop was meanwhile."""
    pid = registry.processes["controller"].pid
    most = before = used([pid])[1]
    answers: list[float] = []
    since = time.perf_counter()
    while goes_on():
        for _ in range(LOOKS_AT_HEALTH):
            began = time.perf_counter()
            assert registry.http("GET", "/health").status == 200
            answers.append(time.perf_counter() - began)
            most = max(most, used([pid])[1])
            time.sleep(LOOK_SECONDS)
    until = time.perf_counter()
    loop, alone = lag.lags(own, since, until), lag.lags(idle, since, until)
    figures = [(loop, 0.5), (loop, 0.99), (alone, 0.99), (answers, 0.5), (answers, 0.99)]
    times = [f"{percentile(values, q) * 1000:.1f} ms" for values, q in figures]
    return [what, *times, f"{(most - before) / (1 << 20):.0f} MiB"]


@contextmanager
def _process(command: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _idle(lags: Path) -> Iterator[Path]:
    """A process that only tells how late it was."""
    with _process([sys.executable, "-m", "bench.lag"], env={**os.environ, lag.FILE: str(lags)}, cwd=ROOT):
        yield lags


def _register(registry: Any, files: list[dict[str, Any]]) -> dict[str, Any]:
    named = [{"name": f"{number}.safetensors", **file} for number, file in enumerate(files)]
    manifest = {"name": "large", "format": "safetensors", "files": named}
    found: dict[str, Any] = registry.http("POST", "/models", manifest).ok(201)
    return found


@contextmanager
def _source(folder: Path, size: int, count: int) -> Iterator[dict[str, Any]]:
    """A source in a process of its own, so that its work is not the controller's."""
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "support.source",
        str(folder),
        "--bytes",
        str(size),
        "--count",
        str(count),
    ]
    with _process(command, stdout=subprocess.PIPE, cwd=ROOT / "tests") as process:
        assert process.stdout is not None
        facts: dict[str, Any] = json.loads(process.stdout.readline())
        yield facts


@contextmanager
def _controller(folder: Path, source: dict[str, Any]) -> Iterator[Any]:
    from support.registry import Registry

    ca: Any = SimpleNamespace(ca_file=source["ca_file"])
    whole = {"FICC_ACQUISITION_STALL_SECONDS": "30", "FICC_ACQUISITION_RANGE_BYTES": str(1 << 30)}
    registry = Registry(folder, ca, **whole)
    registry.command = ("-m", "bench.lag")
    registry.environment |= {lag.FILE: str(folder / "lags"), "PYTHONPATH": str(ROOT)}
    registry.start("controller")
    try:
        yield registry
    finally:
        registry.stop()
