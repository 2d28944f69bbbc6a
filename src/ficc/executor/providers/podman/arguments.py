"""What podman is told: a pure function, so that it can be read and tested whole.

Source: podman-create(1), containers.conf(5), containers-storage.conf(5). Everything that has a default is
pinned: those of distributions differ, and some fail. Paths are those that podman sees (`stage`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ficc.executor.providers.podman.stage import HOME, PIDS, ROOT, SCRATCH, VOID
from ficc.executor.providers.view import DIRECTORIES, HOSTNAME, SANDBOX_ID

LABEL = "ficc.attempt"
ROOT_OFFSET = 1 << 20
"""The host account of the user that the sandbox knows as root is this much above the payload's. Nothing runs
under it once a sandbox is made; it owns what a container engine makes and a payload may not write."""
INIT = "/run/podman-init"
OVER: tuple[str, ...] = ("/sys", "/sys/fs/cgroup", "/dev/mqueue")
"""What podman would mount and no payload needs: an empty, read-only directory is mounted there instead."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Where they are; empty: not found."""

    podman: str
    crun: str
    conmon: str
    init: str


def create(
    program: str,
    name: str,
    *,
    uid: int,
    gid: int,
    processes: int,
    open_files_max: int,
    oom_score_adjustment: int,
    argv: Sequence[str],
) -> list[str]:
    """The command that makes a container of this name over what the stage gathered, without its environment,
    which a command line would show to everyone on the machine (`monitor` adds it)."""
    return [
        *(program, "create", "--name", name, "--label", f"{LABEL}={name}"),
        *("--pull", "never", "--network", "none", "--no-hosts", "--http-proxy=false"),
        *("--read-only", "--read-only-tmpfs=false", "--ipc", "none", "--hostname", HOSTNAME),
        *_identity("uid", uid),
        *_identity("gid", gid),
        *("--user", f"{SANDBOX_ID}:{SANDBOX_ID}", "--workdir", "/"),
        *("--cap-drop", "all", "--security-opt", "no-new-privileges"),
        *("--security-opt", f"seccomp={HOME}/seccomp.json", "--security-opt", "label=disable"),
        *("--cgroups", "disabled", "--oom-score-adj", str(oom_score_adjustment)),
        *("--ulimit", "core=0:0", "--ulimit", f"nofile={open_files_max}:{open_files_max}"),
        *("--ulimit", f"nproc={processes}:{processes}"),
        *("--log-driver", "passthrough", "--restart", "no", "--no-healthcheck", "--systemd", "false"),
        *("--stop-timeout", "0", "--init", "--unsetenv-all"),
        *("--cidfile", f"{PIDS}/{name}.id", "--pidfile", f"{PIDS}/{name}.init"),
        *("--conmon-pidfile", f"{PIDS}/{name}.conmon"),
        *("--mount", f"type=bind,src={SCRATCH}/shm,dst={DIRECTORIES['shm']},bind-propagation=private"),
        *(part for target in OVER for part in ("--mount", f"type=bind,src={VOID},dst={target},ro")),
        *("--rootfs", ROOT, *argv),
    ]


def _identity(kind: str, host: int) -> list[str]:
    """Two identities: the payload's, and the one that the sandbox knows as root."""
    option = f"--{kind}map"
    return [option, f"0:{host + ROOT_OFFSET}:1", option, f"{SANDBOX_ID}:{host}:1"]


def engine_settings(programs: Programs) -> str:
    """containers.conf."""
    return f"""\
[containers]
env = []
default_ulimits = []
default_capabilities = []

[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
conmon_path = ["{HOME}/conmon"]
init_path = {json.dumps(programs.init)}
helper_binaries_dir = []
hooks_dir = []
events_logger = "none"
lock_type = "file"
no_pivot_root = false
static_dir = "{HOME}/graph/libpod"
tmp_dir = "{HOME}/libpod"
volume_path = "{HOME}/volumes"

[engine.runtimes]
crun = [{json.dumps(programs.crun)}]

[network]
network_config_dir = "{HOME}/networks"
"""


def storage_settings() -> str:
    """storage.conf. No image is ever stored: a sandbox's root comes from the executor's own store."""
    return f"""\
[storage]
driver = "vfs"
runroot = "{HOME}/run"
graphroot = "{HOME}/graph"
"""


def environment() -> dict[str, str]:
    """Podman's own: nothing of the executor's, and of the settings only the pinned ones."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": HOME,
        "CONTAINERS_CONF": f"{HOME}/containers.conf",
        "CONTAINERS_STORAGE_CONF": f"{HOME}/storage.conf",
        "CONTAINERS_REGISTRIES_CONF": f"{HOME}/registries.conf",
    }
