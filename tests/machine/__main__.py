"""Runs tests on the commonest kind of host, in a machine made for it: no control groups but v2, and an executor
without root's rights in a subtree that was delegated to it.

usage: PYTHONPATH=tests python -m machine [ARGUMENT OF PYTEST…]

It fails when a test fails, when one is skipped that is not marked `root`, and when the machine does not come up
or does not end in time.
"""

from __future__ import annotations

import io
import signal
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path

from machine import disk, qemu, verdict
from support.executor import CACHE, python_image

PROJECT = Path(__file__).parents[2]
TESTS = (
    "tests/machine/delegated.py",
    "tests/conformance/test_bubblewrap.py",
    "tests/unit/test_executor_cgroups.py",
)
SHARED = ("pyproject.toml", "src", "tests")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the machine ends too
    began = time.monotonic()
    parts = disk.parts()
    python_image(disk.SUITE)
    made = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ficc-machine-") as folder:
        sources, report = Path(folder, "sources"), Path(folder, "report")
        _pack(sources, sys.argv[1:] or list(TESTS))
        try:
            accelerator = qemu.run(parts, sources, report)
        except (qemu.NotUp, qemu.TookTooLong) as error:
            print(f"{error}\nThe machine failed ({type(error).__name__}).", file=sys.stderr)
            return 1
        found = verdict.judge(qemu.read_report(report))
    print("", *found.lines(), sep="\n")
    ran = time.monotonic() - made
    print(f"The machine was made in {made - began:.0f} s and ran for {ran:.0f} s ({accelerator}).")
    return 1 if found.problems else 0


def _pack(path: Path, arguments: list[str]) -> None:
    """The project as it stands, what tests keep between runs, and pytest's arguments."""
    with tarfile.open(path, "w:") as archive:
        for name in SHARED:
            archive.add(PROJECT / name, name, filter=_plain)
        archive.add(CACHE, ".cache/executor", filter=_plain)
        for name in ("METADATA", "entry_points.txt"):
            _add(archive, f"src/ficc-{metadata.version('ficc')}.dist-info/{name}", _metadata(name))
        _add(archive, "arguments", "\n".join(arguments))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Root's, whoever packs it; without what Python left between the sources."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return None if "__pycache__" in member.name else member


def _metadata(name: str) -> str:
    """Of the package as it is installed here: providers and engines are found by it."""
    text = metadata.distribution("ficc").read_text(name)
    assert text is not None, name
    return text


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text.encode())
    member.mode = 0o644
    archive.addfile(member, io.BytesIO(text.encode()))


if __name__ == "__main__":
    sys.exit(main())
