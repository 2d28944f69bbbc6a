"""The bubblewrap options of a sandbox: a pure function, so that they can be read and tested whole.

Source: bwrap(1). Order counts: bubblewrap carries the operations out as they stand, so the root is made
read-only last. The options are handed over in a file (`--args`): a command line, and with it the payload's
environment, could be read by everyone on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping

from ficc.executor.providers.bubblewrap.shim import STAGE
from ficc.executor.providers.view import DIRECTORIES, HOSTNAME, PATH, SANDBOX_ID


def options(environment: Mapping[str, str], *, info_fd: int, block_fd: int, seccomp_fd: int) -> list[str]:
    """Everything but the payload's command, over what the shim gathers below STAGE."""
    return [
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup", "--disable-userns"),
        *("--uid", str(SANDBOX_ID), "--gid", str(SANDBOX_ID), "--hostname", HOSTNAME),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *_environment(environment),
        *("--ro-bind", f"{STAGE}/root", "/"),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--ro-bind", f"{STAGE}/inputs", "/inputs"),
        *(
            part
            for name, target in DIRECTORIES.items()
            for part in ("--bind", f"{STAGE}/scratch/{name}", target)
        ),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/"),
        *("--info-fd", str(info_fd), "--block-fd", str(block_fd), "--seccomp", str(seccomp_fd)),
    ]


def _environment(environment: Mapping[str, str]) -> list[str]:
    merged = {"PATH": PATH, **environment}
    return [part for name, value in merged.items() for part in ("--setenv", name, value)]
