"""The system-call policy of every sandbox: as a BPF program, written with libseccomp, and as a document for
container engines.

A deny list over the kernel's usual policy: nothing that makes namespaces or mounts, loads code into the
kernel, reaches other processes or the clock, and no socket family but local ones. clone3 is answered with
ENOSYS, so that the C library falls back to clone, whose flags a filter can see.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyseccomp

SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK: in an empty network namespace none of them leads out."""

NEW_NAMESPACES = 0x7E020000
"""Every CLONE_NEW* flag of clone(2) but CLONE_NEWTIME, which clone cannot carry."""

DENIED = (
    "_sysctl", "acct", "add_key", "bpf", "chroot", "clock_adjtime", "clock_settime", "delete_module",
    "fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "get_kernel_syms",
    "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp",
    "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie", "modify_ldt", "mount",
    "mount_setattr", "move_mount", "name_to_handle_at", "nfsservctl", "open_by_handle_at", "open_tree",
    "perf_event_open", "personality", "pidfd_getfd", "pivot_root", "process_madvise", "process_vm_readv",
    "process_vm_writev", "ptrace", "quotactl", "reboot", "request_key", "setns", "settimeofday", "stime",
    "swapoff", "swapon", "syslog", "umount", "umount2", "unshare", "uselib", "userfaultfd", "ustat", "vhangup",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """A system call that is answered with an error, whenever its argument `index` compares so (seccomp_rule_add(3);
    of MASKED_EQ, `value` is the mask and `masked` what is left of the argument under it), or always."""

    call: str
    errno: int
    index: int = 0
    operator: str = ""
    value: int = 0
    masked: int = 0


def rules() -> Iterator[Rule]:
    """The policy: whatever no rule matches is allowed."""
    for name in DENIED:
        yield Rule(name, errno.EPERM)
    yield Rule("clone3", errno.ENOSYS)
    for flag in (1 << bit for bit in range(32) if NEW_NAMESPACES >> bit & 1):
        # libseccomp compares one masked value per rule, so each flag has its own.
        yield Rule("clone", errno.EPERM, 0, "MASKED_EQ", flag, flag)
    highest = max(SOCKET_FAMILIES)
    for call in ("socket", "socketpair"):
        for family in sorted(set(range(highest)) - set(SOCKET_FAMILIES)):
            yield Rule(call, errno.EAFNOSUPPORT, 0, "EQ", family)
        yield Rule(call, errno.EAFNOSUPPORT, 0, "GT", highest)


def program() -> bytes:
    """The filter for this machine's architecture; calls of a foreign one are killed by libseccomp."""
    policy = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for rule in rules():
        try:
            policy.add_rule(pyseccomp.ERRNO(rule.errno), rule.call, *_arguments(rule))
        except ValueError:
            if rule.call not in DENIED:
                raise
            # a call that this architecture or this libseccomp does not know
    with tempfile.TemporaryFile() as file:
        policy.export_bpf(file)
        file.seek(0)
        return file.read()


def _arguments(rule: Rule) -> list[Any]:
    if not rule.operator:
        return []
    return [pyseccomp.Arg(rule.index, getattr(pyseccomp, rule.operator), rule.value, rule.masked)]


def profile() -> dict[str, Any]:
    """The same policy as a document for container engines, by the names of the OCI runtime specification. It
    names no architecture: a runtime adds none to the machine's own, and libseccomp kills the calls of others."""
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            {
                "names": [rule.call],
                "action": "SCMP_ACT_ERRNO",
                "errnoRet": rule.errno,
                "args": [
                    {
                        "index": rule.index,
                        "value": rule.value,
                        "valueTwo": rule.masked,
                        "op": f"SCMP_CMP_{rule.operator}",
                    }
                ]
                if rule.operator
                else [],
            }
            for rule in rules()
        ],
    }


def descriptor() -> int:
    """The program in an anonymous file, at its start; the caller closes it."""
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(fd, program())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
