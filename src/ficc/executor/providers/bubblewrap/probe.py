"""Whether bubblewrap works on this machine: found out by trying, since what may forbid it is many things
(its version, the kernel's settings, AppArmor, a container around us), and said with what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ficc.executor.providers.processes import try_out

PROBE_SECONDS = 10.0
NOBODY = 65534
OPTIONS = (
    *("--unshare-user", "--unshare-pid", "--as-pid-1", "--unshare-net", "--disable-userns"),
    *("--ro-bind", "/", "/"),
)
"""As process 1 the program is a child of the first bubblewrap, which waits for it; else an init would be left
behind by it, for this process to adopt."""


def why_it_cannot_run(program: str, *, as_root: bool) -> str | None:
    """None when it made a sandbox. Blocking, some milliseconds. Started by root, it is tried without root's
    rights, as it will be used."""
    if not program:
        return "bubblewrap is not installed; install the package bubblewrap."
    try:
        tried = try_out(
            [program, *OPTIONS, "--", program, "--version"],
            PROBE_SECONDS,
            account=NOBODY if as_root else None,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run: {error}."
    if tried.returncode == 0:
        return None
    words = tried.stderr.strip() or f"it ended with status {tried.returncode}"
    return f"bubblewrap cannot make a sandbox here ({words}); {_advice(words)}"


def _advice(words: str) -> str:
    if "--disable-userns" in words:
        return "version 0.8 or newer is needed."
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == 1:
        return (
            "AppArmor restricts user namespaces: allow them to bubblewrap by a profile, or set "
            "kernel.apparmor_restrict_unprivileged_userns=0."
        )
    if _sysctl("kernel/unprivileged_userns_clone") == 0:
        return "set kernel.unprivileged_userns_clone=1."
    if _sysctl("user/max_user_namespaces") == 0:
        return "set user.max_user_namespaces above 0."
    return "a container around the executor may forbid user namespaces."


def _sysctl(name: str) -> int | None:
    try:
        return int((Path("/proc/sys") / name).read_text())
    except (OSError, ValueError):
        return None
