"""A hub's repository: what it may be called, and which of its GGUF files make a model together.

Shards of one set are one model, and only a whole set is one. Projectors (`mmproj`) belong to models and are
none of their own; they are named, so that whoever wants one can add it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ficc.domain.errors import Refused, invalid
from ficc.domain.manifest import shard_of

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a repository at a commit. `sha256` is None where the hub declares no digest of its bytes."""

    path: str
    bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one model, shards in order. `name` is what they have in common."""

    name: str
    files: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    models: tuple[Group, ...]
    projectors: tuple[Entry, ...]
    incomplete: tuple[str, ...]
    """Shards that are missing, by the name they would have."""


def check_repository(repository: str) -> None:
    """Raises Refused `invalid_request`."""
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise invalid(
            "A repository is owner/name, of letters, digits, dots, dashes and underscores.", "repository"
        )


def check_revision(revision: str) -> None:
    """Raises Refused `invalid_request`."""
    parts = revision.split("/")
    if not _REVISION.fullmatch(revision) or any(part in ("", ".", "..") for part in parts):
        raise invalid("A revision is a branch, a tag or a commit of 40 hex characters.", "revision")


def gguf_groups(entries: Sequence[Entry]) -> Groups:
    """The GGUF files of a repository as models, in the order of their names."""
    models: list[Group] = []
    projectors: list[Entry] = []
    sets: dict[tuple[str, int], dict[int, Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.path):
        base = entry.path.rsplit("/", 1)[-1].lower()
        if not base.endswith(".gguf"):
            continue
        if "mmproj" in base:
            projectors.append(entry)
            continue
        shard = shard_of(entry.path)
        if shard is None:
            models.append(Group(entry.path[: -len(".gguf")], (entry,)))
        else:
            sets.setdefault(shard[0], {})[shard[1]] = entry
    incomplete: list[str] = []
    for (stem, count), present in sets.items():
        missing = [number for number in range(1, count + 1) if number not in present]
        incomplete += [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in missing]
        if not missing:
            models.append(Group(stem, tuple(present[number] for number in range(1, count + 1))))
    return Groups(
        tuple(sorted(models, key=lambda group: group.name)), tuple(projectors), tuple(sorted(incomplete))
    )


def of_file(groups: Groups, path: str) -> Group:
    """The model that a file is part of. Raises Refused, naming the missing shard where that is why."""
    for group in groups.models:
        if path in (group.name, *(entry.path for entry in group.files)):
            return group
    shard = shard_of(path)
    if shard is not None:
        stem = shard[0][0]
        missing = [name for name in groups.incomplete if name.startswith(stem + "-")]
        if missing:
            raise invalid(f"The repository lacks the shard {missing[0]}.", "filename")
    if path in {entry.path for entry in groups.projectors}:
        raise invalid(f"{path!r} is a projector; name the model it belongs to.", "filename")
    names = ", ".join(group.name for group in groups.models[:10]) or "no GGUF file"
    raise Refused("not_found", f"The repository has no GGUF file {path[:200]!r}; it has {names}.", "filename")


def digests(group: Group) -> tuple[str, ...]:
    """Raises Refused `content_hash_missing` for a file that the hub declares no digest of."""
    for entry in group.files:
        if entry.sha256 is None:
            raise Refused(
                "content_hash_missing",
                f"The hub declares no SHA-256 of {entry.path!r}; take its publisher's, or hash a copy locally.",
                "filename",
            )
    return tuple(entry.sha256 or "" for entry in group.files)
