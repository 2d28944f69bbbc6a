"""Who uses an image on this machine: processes whose root or mounts are in it, by the kernel's own tables.

A sandbox that is still being made may not have mounted the image yet; then making it fails and says so.
"""

from __future__ import annotations

from pathlib import Path


def processes_of(image_digest: str) -> list[int]:
    """Processes, as far as this account may look, whose file systems hold the image's root."""
    folder = f"/{image_digest.removeprefix('sha256:')}/".encode()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            mounts = (process / "mountinfo").read_bytes()
        except OSError:  # it ended, or it is another account's
            continue
        if folder in mounts:
            found.append(int(process.name))
    return found
