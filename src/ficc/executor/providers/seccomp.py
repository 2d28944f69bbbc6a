"""The system-call policy of every sandbox, as a BPF program, written with libseccomp.

A deny list over the kernel's usual policy: nothing that makes namespaces or mounts, loads code into the
kernel, reaches other processes or the clock, and no socket family but local ones. clone3 is answered with
ENOSYS, so that the C library falls back to clone, whose flags a filter can see.
"""

from __future__ import annotations

import errno
import os
import tempfile

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


def program() -> bytes:
    """The filter for this machine's architecture; calls of a foreign one are killed by libseccomp."""
    policy = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    for name in DENIED:
        try:
            policy.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
        except ValueError:
            continue  # a call that this architecture or this libseccomp does not know
    policy.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    for flag in (1 << bit for bit in range(32) if NEW_NAMESPACES >> bit & 1):
        # libseccomp compares one masked value per rule, so each flag has its own.
        policy.add_rule(
            pyseccomp.ERRNO(errno.EPERM), "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, flag, flag)
        )
    unsupported = pyseccomp.ERRNO(errno.EAFNOSUPPORT)
    highest = max(SOCKET_FAMILIES)
    for call in ("socket", "socketpair"):
        for family in set(range(highest)) - set(SOCKET_FAMILIES):
            policy.add_rule(unsupported, call, pyseccomp.Arg(0, pyseccomp.EQ, family))
        policy.add_rule(unsupported, call, pyseccomp.Arg(0, pyseccomp.GT, highest))
    with tempfile.TemporaryFile() as file:
        policy.export_bpf(file)
        file.seek(0)
        return file.read()


def descriptor() -> int:
    """The program in an anonymous file, at its start; the caller closes it."""
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(fd, program())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
