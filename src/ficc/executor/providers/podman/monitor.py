"""In the place of conmon, podman's monitor of a container: joins the attempt's cgroups, and becomes conmon.

Podman runs `monitor.py CONMON ARGUMENT…`, by a script that the provider writes. What podman starts here is the
container's monitor, and from it descend the OCI runtime and everything of the payload: all of them are in the
groups from their first moment, and make none of their own. If podman is gone, or the executor, this ends
before anything is made; once it has joined, whoever kills the group kills it.

Three things of podman's are changed on the way. The environment of the payload is written into the container's
configuration, unseen by others. Both output streams are the executor's pipe. And what conmon would run when
the container ended is left out: the executor cleans up. Standard library only. Exit status 125: something
here failed, said on standard error.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))  # isolated, Python looks only where its own library is
from ficc.executor.providers import linux
from ficc.executor.providers.podman.stage import LAUNCH

CGROUPS = "/sys/fs/cgroup"
HYBRID = f"{CGROUPS}/unified"
BUNDLE = ("-b", "--bundle")
EXIT_COMMAND = "--exit-command"


def main() -> None:
    program, *arguments = sys.argv[1:]
    with open(LAUNCH) as file:
        launch = json.load(file)
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != launch["podman"]:
        raise OSError("podman is gone")
    for path in launch["join"]:
        with open(path, "w") as file:
            file.write("0")
    # Descriptors are gone before anyone can see them closed: who sweeps the group from there on finds this.
    if not os.path.lexists(f"/proc/{launch['executor']}/fd/{launch['descriptor']}"):
        raise OSError("the executor is gone")
    _complete(_bundle(arguments), launch["environment"])
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWCGROUP, "a mount and a cgroup namespace")
    linux.make_mounts_private()
    if os.path.isdir(HYBRID):  # crun refuses such machines, and here has no groups to make
        linux.mount("none", CGROUPS, "tmpfs", linux.MS_RDONLY, "size=4k")
    os.dup2(2, 1)
    linux.set_parent_death_signal(0)
    linux.default_signals()
    os.execve(program, [program, *_without_exit_command(arguments)], dict(os.environ))  # noqa: S606


def _bundle(arguments: list[str]) -> str:
    return next(value for name, value in itertools.pairwise(arguments) if name in BUNDLE)


def _complete(bundle: str, environment: dict[str, str]) -> None:
    path = f"{bundle}/config.json"
    with open(path) as file:
        configuration: dict[str, Any] = json.load(file)
    configuration["process"]["env"] = [f"{name}={value}" for name, value in environment.items()]
    os.chmod(path, 0o600)
    with open(path, "w") as file:
        json.dump(configuration, file)


def _without_exit_command(arguments: list[str]) -> list[str]:
    kept, skip = [], False
    for argument in arguments:
        if not skip and not argument.startswith(EXIT_COMMAND):
            kept.append(argument)
        skip = not skip and argument.startswith(EXIT_COMMAND) and "=" not in argument
    return kept


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        print(f"monitor: {error}", file=sys.stderr)
        sys.exit(125)
