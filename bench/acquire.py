"""The acquisition row of the performance budget: from a source over TLS on loopback, against `curl` that writes the
same file and `sha256sum` that reads it back."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.load import percentile, used
from bench.relay import table
from bench.setup import ROOT, Bench

BYTES = 2 << 30
FILES = 4
LOOK_SECONDS = 0.01


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
    with _source(folder / "source", size, FILES) as source, _controller(folder / "ficc", source) as registry:
        pid, looks = registry.processes["controller"].pid, []
        most = before = used([pid])[1]
        model = _register(registry, source["files"])
        registry.acquire(model)
        while registry.model(model)["state"] != "ready":
            began = time.perf_counter()
            assert registry.http("GET", "/health").status == 200
            looks.append(time.perf_counter() - began)
            most = max(most, used([pid])[1])
            time.sleep(LOOK_SECONDS)
    row: list[object] = [
        f"{(most - before) / (1 << 20):.0f} MiB",
        f"{percentile(looks, 0.5) * 1000:.1f} ms",
        f"{percentile(looks, 0.99) * 1000:.1f} ms",
    ]
    table(f"{FILES} files at once", ["growth of the controller", "GET /health p50", "GET /health p99"], [row])


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
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT / "tests", text=True)
    try:
        assert process.stdout is not None
        facts: dict[str, Any] = json.loads(process.stdout.readline())
        yield facts
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _controller(folder: Path, source: dict[str, Any]) -> Iterator[Any]:
    from support.registry import Registry

    ca: Any = SimpleNamespace(ca_file=source["ca_file"])
    whole = {"FICC_ACQUISITION_STALL_SECONDS": "30", "FICC_ACQUISITION_RANGE_BYTES": str(1 << 30)}
    registry = Registry(folder, ca, **whole)
    registry.start("controller")
    try:
        yield registry
    finally:
        registry.stop()
