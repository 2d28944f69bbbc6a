"""The upload row of the performance budget, against what the disk and the hash allow."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time

from bench.relay import table
from bench.setup import Bench

BYTES = 1 << 30
PIECE = 16 << 20


async def uploads(bench: Bench) -> None:
    """Octet streams of 16 MiB, against `dd oflag=dsync` of the same and then `sha256sum`."""
    piece = os.urandom(PIECE)
    digest = hashlib.sha256()
    for _ in range(BYTES // PIECE):
        digest.update(piece)
    file = {"name": "large.gguf", "bytes": BYTES, "sha256": digest.hexdigest()}
    async with bench.api() as api:
        model = await api.call("POST", "/models", {"name": "large", "format": "gguf", "files": [file]})
        began = time.perf_counter()
        offset = 0
        while offset < BYTES:
            offset = (await api.upload(model["id"], 0, offset, piece))["offset"]
        ours = BYTES / (time.perf_counter() - began)
        assert (await api.call("GET", f"/models/{model['id']}"))["state"] == "ready"
        await api.call("DELETE", f"/models/{model['id']}")
    source, target = bench.directory / "piece", bench.directory / "copy"
    source.write_bytes(piece)
    began = time.perf_counter()
    for number in range(BYTES // PIECE):
        command = [
            "dd",
            f"if={source}",
            f"of={target}",
            "bs=16M",
            "oflag=dsync",
            f"seek={number}",
            "conv=notrunc",
        ]
        subprocess.run(command, check=True, capture_output=True)
    subprocess.run(["sha256sum", str(target)], check=True, capture_output=True)
    theirs = BYTES / (time.perf_counter() - began)
    rows: list[list[object]] = [
        [f"{ours / 1e6:.0f} MB/s", f"{theirs / 1e6:.0f} MB/s", f"{ours / theirs:.2f}"]
    ]
    table("Octet-stream upload, 1 GiB", ["ficc", "dd dsync, then sha256sum", "ratio"], rows)
