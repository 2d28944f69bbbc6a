"""What a payload sees of where it is, whichever provider made its sandbox."""

from __future__ import annotations

from collections.abc import Mapping

SANDBOX_ID = 65534
"""The uid and gid the payload sees; its host account is another."""
HOSTNAME = "sandbox"
PATH = "/usr/local/bin:/usr/bin:/bin"
RUN = "/run/ficc"
"""Where sockets and outputs lie."""
DIRECTORIES: Mapping[str, str] = {"run": RUN, "tmp": "/tmp", "shm": "/dev/shm"}  # noqa: S108
"""What is writable in a sandbox, all of it on the one scratch tmpfs."""
