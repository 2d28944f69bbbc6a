"""What every long-running process of ours does to itself."""

from __future__ import annotations

import resource


def raise_open_files() -> None:
    """Take as many file descriptors as this account may have: each open request holds one or two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
