"""What is in force in a sandbox, read back from the kernel and held against its plan."""

from __future__ import annotations

import os

from ficc.executor import cgroups
from ficc.executor.providers import processes
from ficc.executor.providers.contract import Launch

CAPABILITIES = ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")


def differences(launch: Launch, pid: int, run_directory: int) -> list[str]:
    """In words; empty when all is as planned. `pid` is the sandbox's first process, `run_directory` a
    descriptor of a directory in its scratch space. Raises OSError when it ended."""
    found, expected = _found(launch, pid, run_directory), _expected(launch)
    return [
        f"{name} is {found[name]}, not {expected[name]}" for name in expected if found[name] != expected[name]
    ]


def _expected(launch: Launch) -> dict[str, int | str]:
    limits = launch.plan.limits
    expected: dict[str, int | str] = {
        "cpu_millis": limits.cpu_millis,
        "memory_bytes": cgroups.whole_pages(limits.memory_bytes),
        "swap_bytes": cgroups.whole_pages(limits.swap_bytes),
        "processes": limits.processes,
        "storage_bytes": cgroups.whole_pages(limits.storage_bytes + cgroups.PAGE - 1),
        "storage_inodes": limits.storage_inodes,
        "host uid": launch.uid,
        "host gid": launch.gid,
        "no_new_privs": "1",
        "capabilities": "0" * 16,
        "root": "ro",
        "interfaces": "lo",
        "in the cgroups": "yes",
        "own namespaces": "yes",
    }
    if launch.uid != os.geteuid():
        expected["supplementary groups"] = ""
    return expected


def _found(launch: Launch, pid: int, run_directory: int) -> dict[str, int | str]:
    status = processes.status(pid)
    space = os.fstatvfs(run_directory)
    root = os.statvfs(f"/proc/{pid}/root")
    return {
        **launch.group.limits(),
        "storage_bytes": space.f_blocks * space.f_frsize,
        "storage_inodes": space.f_files,
        "host uid": int(status["Uid"].split()[0]),
        "host gid": int(status["Gid"].split()[0]),
        "supplementary groups": " ".join(set(status["Groups"].split()) - {str(launch.gid)}),
        "no_new_privs": status["NoNewPrivs"],
        "capabilities": max(status[name] for name in CAPABILITIES),
        "root": "ro" if root.f_flag & os.ST_RDONLY else "rw",
        "interfaces": " ".join(_interfaces(pid)),
        "in the cgroups": "yes" if launch.group.holds(pid) else "no",
        "own namespaces": "yes" if _own_namespaces(pid) else "no",
    }


def _interfaces(pid: int) -> list[str]:
    with open(f"/proc/{pid}/net/dev") as file:
        return [line.split(":")[0].strip() for line in file.readlines()[2:]]


def _own_namespaces(pid: int) -> bool:
    return all(
        os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
        for kind in ("user", "pid_for_children", "net", "ipc", "uts", "mnt", "cgroup")
    )
