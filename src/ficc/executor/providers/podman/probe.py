"""Whether podman works on this machine: found out by trying, with the settings that sandboxes are made with,
and said with what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ficc.executor.providers import processes
from ficc.executor.providers.podman import engine, stage
from ficc.executor.providers.podman.arguments import Programs

PROBE_SECONDS = 30.0
VERSION_MIN = (4, 3)
PLACES = ("/usr/libexec/podman", "/usr/local/libexec/podman", "/usr/lib/podman")
"""Where distributions keep what podman alone calls."""
PACKAGES = {"podman": "podman", "crun": "crun", "conmon": "conmon", "init": "catatonit"}
WITHOUT_ROOT = (
    "podman is used by root only: without root it ignores limits on cgroup v1 and gives payloads no accounts of "
    "their own; run the executor as root, or choose the provider bubblewrap."
)


def find_programs() -> Programs:
    return Programs(_find("podman"), _find("crun"), _find("conmon"), _find("catatonit"))


def _find(name: str) -> str:
    path = os.pathsep.join((os.environ.get("PATH", ""), *PLACES))
    return shutil.which(name, path=path) or ""


def why_it_cannot_run(programs: Programs, *, as_root: bool) -> str | None:
    """None when podman answered on a stage like a sandbox's. Blocking, for about half a second."""
    if not as_root:
        return WITHOUT_ROOT
    missing = [package for name, package in PACKAGES.items() if not getattr(programs, name)]
    if missing:
        packages = " ".join(missing)
        return f"{', '.join(missing)} not installed; install {packages} (no recommended packages are needed)."
    try:
        version = processes.try_out([programs.podman, "--version"], PROBE_SECONDS)
        found = re.search(r"(\d+)\.(\d+)", version.stdout)
        if found is None or (int(found[1]), int(found[2])) < VERSION_MIN:
            wanted = ".".join(map(str, VERSION_MIN))
            return f"podman {wanted} or newer is needed; this is {version.stdout.strip() or 'no podman'}."
        tried = _try(programs)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"podman does not run: {error}."
    if tried.returncode == 0 and tried.stdout.strip() == "crun":
        return None
    words = tried.stderr.strip() or tried.stdout.strip() or f"it ended with status {tried.returncode}"
    return f"podman cannot make a sandbox here ({words}); a container around the executor may forbid mounts."


def _try(programs: Programs) -> subprocess.CompletedProcess[str]:
    """Ask podman for its runtime, on a stage over an empty image."""
    with tempfile.TemporaryDirectory(prefix="ficc-podman-") as folder:
        image = Path(folder) / "image"
        for point in stage.POINTS:
            (image / point).mkdir(parents=True)
        tried = engine.Engine(programs, Path(folder) / "state")
        tried.prepare()
        launch = {
            "image_root": str(image),
            "inputs": [],
            "scratch": {"bytes": 1 << 20, "inodes": 16, "directories": {}},
            "program": "",
            "uid": 0,
            "gid": 0,
            "monitor": {},
        }
        command = (programs.podman, "info", "--format", "{{.Host.OCIRuntime.Name}}")
        spec = engine.stage_spec(tried.home, [command], launch=launch)
        with processes.Descriptors() as held:
            fd = held.keep(processes.anonymous_file(json.dumps(spec)))
            argv = [sys.executable, "-I", "-S", stage.__file__, str(fd)]
            return processes.try_out(argv, PROBE_SECONDS, pass_fds=[fd])
