"""The machine itself: qemu, with the fastest accelerator that gets it up."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import tarfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from machine.disk import Parts

UP = b"machine: up"
UP_SECONDS_MAX = {"kvm": 20.0, "tcg": 120.0}
"""How long the machine may take until it says that it is up. On some hosts KVM is there and cannot run the
kernel; then it is emulated."""
RUN_SECONDS_MAX = 1500.0
MEMORY_MIB = 2048
CORES = 2
REPORT_BYTES_MAX = 16 << 20
LAST_LINES = 40


class NotUp(Exception):
    """The machine did not start; the text has the end of its console."""


class TookTooLong(Exception):
    """The machine was up and did not end in time."""


def run(parts: Parts, sources: Path, report: Path) -> str:
    """Starts the machine and shows its console until it turns itself off; which accelerator it had. `report`
    is made, and then holds what the machine wrote to it."""
    accelerators = ["kvm", "tcg"] if os.access("/dev/kvm", os.R_OK | os.W_OK) else ["tcg"]
    for accelerator in accelerators:
        with report.open("wb") as file:
            file.truncate(REPORT_BYTES_MAX)
        try:
            _run_with(accelerator, parts, sources, report)
        except NotUp:
            if accelerator == accelerators[-1]:
                raise
            print(f"The machine does not start with {accelerator}.", flush=True)
        else:
            break
    return accelerator


def _run_with(accelerator: str, parts: Parts, sources: Path, report: Path) -> None:
    qemu = shutil.which("qemu-system-x86_64")
    if qemu is None:
        raise NotUp("qemu-system-x86_64 is not installed: install the package qemu-system-x86.")
    disks = ((parts.disk, "on"), (sources, "on"), (report, "off"))  # on: what is written is forgotten
    command = [
        *(qemu, "-accel", accelerator, "-cpu", "max", "-smp", str(CORES), "-m", str(MEMORY_MIB)),
        *(
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-nic",
            "none",
            "-serial",
            "stdio",
        ),
        *("-kernel", str(parts.kernel), "-initrd", str(parts.initial)),
        *("-append", "console=ttyS0 loglevel=1 panic=-1 no_timer_check cgroup_no_v1=all"),
        *_drives(disks),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    try:
        _follow(process.stdout, UP_SECONDS_MAX[accelerator])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _drives(disks: Sequence[tuple[Path, str]]) -> list[str]:
    found = []
    for path, snapshot in disks:
        found += ["-drive", f"file={path},format=raw,if=virtio,snapshot={snapshot}"]
    return found


def _follow(console: IO[bytes], up_seconds: float) -> None:
    """Show what it says from when it is up, until it ends."""
    last: deque[bytes] = deque(maxlen=LAST_LINES)
    until, up, rest = time.monotonic() + up_seconds, False, b""
    with selectors.DefaultSelector() as selector:
        selector.register(console, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
            data = os.read(console.fileno(), 65536)
            if not data:
                if up:
                    return
                raise NotUp(_text(last, rest))
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                last.append(line)
                if not up and line.startswith(UP):
                    up, until = True, time.monotonic() + RUN_SECONDS_MAX
                if up:
                    print(line.decode(errors="replace").rstrip("\r"), flush=True)
    if up:
        raise TookTooLong(f"The machine did not end within {RUN_SECONDS_MAX:.0f} s.")
    raise NotUp(_text(last, rest))


def _text(lines: deque[bytes], rest: bytes) -> str:
    return b"\n".join([*lines, rest]).decode(errors="replace")


def read_report(report: Path) -> dict[str, str]:
    """The files that the machine left; none when it left nothing whole."""
    try:
        with tarfile.open(report, "r:") as archive:
            members = [(member.name, archive.extractfile(member)) for member in archive]
            return {name: file.read().decode() for name, file in members if file is not None}
    except tarfile.ReadError:
        return {}
