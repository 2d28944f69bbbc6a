"""What an executor is told: directories, accounts, and how much of the machine it may give away."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ficc.settings import PROVIDER, RESERVE_MEMORY_BYTES, WORKLOAD_UID_BASE


def _fault(error: BaseException | None) -> None:
    """A fault of ours in a background task: said, and the executor ends, so that it starts clean."""
    sys.exit(f"executor: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    state_directory: Path
    content_directory: Path
    socket: Path
    peers: frozenset[int] = frozenset()
    """Host uids that may connect, besides root and the executor's own."""
    uid_base: int = WORKLOAD_UID_BASE
    reserve_memory_bytes: int = RESERVE_MEMORY_BYTES
    provider: str = PROVIDER
    on_fault: Callable[[BaseException | None], None] = field(default=_fault)

    @property
    def logs_directory(self) -> Path:
        return self.state_directory / "logs"

    @property
    def outputs_directory(self) -> Path:
        return self.state_directory / "outputs"

    @property
    def verdicts_directory(self) -> Path:
        return self.state_directory / "verdicts"

    @property
    def images_directory(self) -> Path:
        return self.state_directory / "images"

    @property
    def accounts(self) -> bool:
        """Whether payloads get host accounts of their own."""
        return os.geteuid() == 0

    def account(self, number: int) -> tuple[int, int]:
        """The host uid and gid of the payload with this account number."""
        if self.accounts:
            return self.uid_base + number, self.uid_base + number
        return os.geteuid(), os.getegid()
