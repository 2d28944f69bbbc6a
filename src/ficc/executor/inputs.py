"""The inputs of an attempt: blobs of the content store, bound as they are and never copied.

No engine reads a file whose bytes were not hashed here. A file that was found right is remembered by what its inode
says of itself, and hashed again once that changed: so a blob costs one reading, whatever starts from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

from ficc.content.store import ContentStore, hash_file
from ficc.domain.errors import Refused
from ficc.domain.plan import Input, Plan
from ficc.executor.ledger import Identity, Ledger

TICK_SECONDS = 0.02
"""The kernel's clock for times of change moves in steps of a few milliseconds. A file is left alone for this long
before its bytes are read, so that no later change has the same time."""


class VerifiedFile:
    """The file behind an input, to be read while an attempt runs: only as long as it is the very one that was
    verified."""

    def __init__(self, entry: Input, path: Path, identity: Identity | None) -> None:
        self.entry = entry
        self._path = path
        self._identity = identity

    def open(self) -> int:
        """A descriptor for reading. Raises Refused."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Refused(
                "model_not_ready", f"The content of {self.entry.name} cannot be read: {error.strerror}."
            ) from error
        try:
            self.check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check(self, fd: int) -> None:
        """Raises Refused for a file that is not, or no longer, what was verified."""
        facts = os.fstat(fd)
        if Identity(facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns) != self._identity:
            raise Refused("source_mismatch", f"The content of {self.entry.name} is not as it was verified.")


class Inputs:
    def __init__(self, content: ContentStore, ledger: Ledger) -> None:
        self._content = content
        self._ledger = ledger
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(1, "verify")  # one disk, read in order

    async def verified(self, plan: Plan, unwanted: Callable[[], bool]) -> dict[str, Path]:
        """Each input's name and the blob behind it. `unwanted` is asked while bytes are read, from another
        thread. Raises Refused for one that is missing, or not what its digest says."""
        found: dict[str, Path] = {}
        for entry in plan.inputs:
            path = self._content.blob(entry.sha256)
            # Two replicas of one model: the second finds what the first one did.
            async with self._turns.setdefault(entry.sha256, asyncio.Lock()):
                await self._verify(entry, path, unwanted)
            found[entry.name] = path
        return found

    def files(self, plan: Plan) -> dict[str, VerifiedFile]:
        """Of the inputs that an engine may be handed over its own API, by their ids."""
        wanted = () if plan.endpoint is None else plan.endpoint.upload_input_ids
        return {
            entry.id: VerifiedFile(
                entry, self._content.blob(entry.sha256), self._ledger.verified(entry.sha256)
            )
            for entry in plan.inputs
            if entry.id in wanted
        }

    async def _verify(self, entry: Input, path: Path, unwanted: Callable[[], bool]) -> None:
        identity = await asyncio.to_thread(_identity, entry, path)
        if self._ledger.verified(entry.sha256) == identity:
            return
        if time.time_ns() - identity.ctime_ns < TICK_SECONDS * 1e9:
            await asyncio.sleep(TICK_SECONDS)

        def progress(_: int) -> None:
            if unwanted():
                raise InterruptedError

        def run() -> str:
            digest = hash_file(path, progress) if entry.bytes else hashlib.sha256()
            return digest.hexdigest() if _identity(entry, path) == identity else "something that changes"

        try:
            actual = await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except InterruptedError:
            raise Refused(
                "action_not_allowed", "The attempt was stopped while its inputs were read."
            ) from None
        except OSError as error:
            raise Refused(
                "model_not_ready", f"The content of {entry.name} cannot be read: {error.strerror}."
            ) from error
        if actual != entry.sha256:
            raise Refused(
                "source_mismatch",
                f"The content of {entry.name} hashes to {actual}, not to {entry.sha256}: it was damaged on this "
                "machine, and nothing was launched.",
            )
        self._ledger.remember(entry.sha256, identity)


def _identity(entry: Input, path: Path) -> Identity:
    """Of a blob that looks as one has to. Raises Refused."""
    try:
        facts = os.lstat(path)
    except OSError as error:
        raise Refused("model_not_ready", f"The content of {entry.name} is not on this machine.") from error
    plain = stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o222
    if not plain or facts.st_size != entry.bytes:
        raise Refused("source_mismatch", f"The content of {entry.name} is not as it was verified.")
    return Identity(facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
