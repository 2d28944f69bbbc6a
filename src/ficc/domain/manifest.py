"""A model's manifest: its files by name, size and digest, and the rules they obey.

A manifest is immutable once registered. Its hash is the model's revision, so two manifests are the same
model exactly when their canonical forms are the same bytes; null equals absent, and the order of the
files counts because it defines their index.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from urllib.parse import urlsplit

from ficc.domain import canonical
from ficc.domain.errors import Refused, invalid

FILES_MAX = 4096
NAME_BYTES_MAX = 1024
COMPONENT_BYTES_MAX = 255
URL_CHARACTERS_MAX = 2048
TEXT_CHARACTERS_MAX = 256

Format = Literal["gguf", "safetensors"]
Capability = Literal["chat", "completions", "embeddings", "rerank"]

SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.IGNORECASE)
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # categories of characters
_SPECIAL = re.compile(r'[\\:<>"|?*]')
_RESERVED = frozenset(
    [
        *("con", "prn", "aux", "nul", "conin$", "conout$"),
        *(f"{port}{n}" for port in ("com", "lpt") for n in "0123456789¹²³"),
    ]
)


@dataclass(frozen=True, slots=True)
class File:
    name: str
    bytes: int
    sha256: str
    url: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256, "url": self.url}


@dataclass(frozen=True, slots=True)
class Manifest:
    name: str
    format: Format
    files: tuple[File, ...]
    capabilities: tuple[Capability, ...] | None = None
    licence: str | None = None
    source: Mapping[str, str] | None = None

    def as_json(self) -> dict[str, Any]:
        """The document as registered, absent members left out."""
        document: dict[str, Any] = canonical.without_absent(
            {
                "name": self.name,
                "format": self.format,
                "capabilities": None if self.capabilities is None else list(self.capabilities),
                "licence": self.licence,
                "source": self.source,
                "files": [file.as_json() for file in self.files],
            }
        )
        return document

    @property
    def revision(self) -> str:
        """SHA-256 of the canonical manifest: what a replica records as `model_revision`."""
        return canonical.digest(self.as_json())

    @property
    def bytes_total(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def served_capabilities(self) -> tuple[Capability, ...]:
        """What the model may be asked for: what was declared, else chat."""
        return self.capabilities if self.capabilities is not None else ("chat",)

    @property
    def weights(self) -> tuple[File, ...]:
        """The files of the format itself, without projectors."""
        return tuple(file for file in self.files if self._holds_weights(file.name))

    @property
    def entry(self) -> File:
        """The file an engine is pointed at: the first one of the format that is no projector, and of a
        set of shards its shard 1; else the first file."""
        weights = self.weights
        first = (weights or self.files)[0]
        shard = shard_of(first.name)
        if shard is None:
            return first
        return next((file for file in weights if shard_of(file.name) == (shard[0], 1)), first)

    def _holds_weights(self, name: str) -> bool:
        base = name.rsplit("/", 1)[-1].lower()
        return base.endswith("." + self.format) and "mmproj" not in base


def manifest(document: Mapping[str, Any]) -> Manifest:
    """A manifest from its JSON document, whose member types were checked at the edge.

    Raises Refused `invalid_request` naming the member or file that breaks a rule.
    """
    files = tuple(File(f["name"], f["bytes"], f["sha256"], f.get("url")) for f in document["files"])
    capabilities = document.get("capabilities")
    checked = Manifest(
        name=document["name"],
        format=document["format"],
        files=files,
        capabilities=None if capabilities is None else tuple(capabilities),
        licence=document.get("licence"),
        source=document.get("source"),
    )
    _check(checked)
    return checked


def _check(m: Manifest) -> None:
    _check_text(m.name, "name")
    if m.licence is not None:
        _check_text(m.licence, "licence")
    if m.capabilities is not None and len(set(m.capabilities)) != len(m.capabilities):
        raise invalid("A capability is listed twice; list each once.", "capabilities")
    if m.source is not None:
        _check_source(m.source)
    if not 1 <= len(m.files) <= FILES_MAX:
        raise invalid(f"A manifest has 1 to {FILES_MAX} files; this one has {len(m.files)}.", "files")
    seen: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for index, file in enumerate(m.files):
        _check_file(file, f"files[{index}]")
        folded = fold(file.name)
        if folded in seen:
            other = m.files[seen[folded]].name
            raise invalid(
                f"{file.name!r} and {other!r} are one name on some file systems; rename one.",
                f"files[{index}].name",
            )
        seen[folded] = index
        if sizes.setdefault(file.sha256, file.bytes) != file.bytes:
            raise invalid(
                f"{file.name!r} has the digest of another file but not its size; correct one of them.",
                f"files[{index}].bytes",
            )
    if m.bytes_total > canonical.INTEGER_MAX:
        raise invalid("The files add up to more than 2^53-1 bytes.", "files")
    _check_no_file_is_a_directory(m.files, seen)
    if m.format == "gguf":
        _check_shards([file.name for file in m.files])


def _check_text(text: str, param: str) -> None:
    if not 1 <= len(text) <= TEXT_CHARACTERS_MAX or any(_unprintable(c) for c in text):
        raise invalid(f"{param} is 1 to {TEXT_CHARACTERS_MAX} printable characters.", param)


def _unprintable(character: str) -> bool:
    category = unicodedata.category(character)
    return category.startswith("C") or category in ("Zl", "Zp")


def _check_source(source: Mapping[str, str]) -> None:
    _check_text(source["repository"], "source.repository")
    if not _COMMIT.fullmatch(source["revision"]):
        raise invalid("A hub revision is a commit of 40 lower-case hex characters.", "source.revision")


def _check_file(file: File, at: str) -> None:
    problem = name_problem(file.name)
    if problem:
        raise invalid(f"File name {file.name!r}: {problem}", f"{at}.name")
    if not 0 <= file.bytes <= canonical.INTEGER_MAX:
        raise invalid(f"{file.name!r}: bytes is an integer from 0 to 2^53-1.", f"{at}.bytes")
    if not SHA256.fullmatch(file.sha256):
        raise invalid(
            f"{file.name!r}: sha256 is 64 lower-case hex characters without a prefix.", f"{at}.sha256"
        )
    if file.url is not None:
        _check_url(file, at)


def _check_url(file: File, at: str) -> None:
    url = file.url or ""
    try:
        parts = urlsplit(url)
        fine = (
            parts.scheme == "https"
            and bool(parts.hostname)
            and parts.username is None
            and parts.password is None
            and not parts.query
            and not parts.fragment
            and "?" not in url
            and "#" not in url
            and len(url) <= URL_CHARACTERS_MAX
            and url.isascii()
            and url.isprintable()
            and " " not in url
            and "\\" not in url  # some readers take it for a slash, and so see another host
        )
        _ = parts.port  # raises ValueError for a port that is none
    except ValueError:
        fine = False
    if not fine:
        raise invalid(
            f"{file.name!r}: url is https without user info, query or fragment, since manifests are "
            "readable by the whole project.",
            f"{at}.url",
        )


def name_problem(name: str) -> str | None:
    """What is wrong with a file name, or None.

    A name is a relative path whose components are plain on every common file system.
    """
    if not name or len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        return f"a name has 1 to {NAME_BYTES_MAX} bytes."
    if not name.isprintable() and any(unicodedata.category(c) in _INVISIBLE for c in name):
        return "control, format and surrogate characters are not allowed."
    if _SPECIAL.search(name):
        return 'none of \\ : < > " | ? * is allowed.'
    for component in name.split("/"):
        problem = _component_problem(component)
        if problem:
            return problem
    return None


def _component_problem(component: str) -> str | None:
    if component in ("", ".", ".."):
        return "a name is a relative path without empty, '.' or '..' components."
    if len(component.encode("utf-8", "surrogatepass")) > COMPONENT_BYTES_MAX:
        return f"a component has at most {COMPONENT_BYTES_MAX} bytes."
    if component[0] == " " or component[-1] in " .":
        return "a component neither starts nor ends with a space, nor ends with a dot."
    if component.split(".")[0].rstrip(" ").casefold() in _RESERVED:
        return "the name is reserved on Windows."
    return None


def fold(name: str) -> str:
    """The form in which two names must differ: NFC, then case folding, then NFC again."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _check_no_file_is_a_directory(files: Sequence[File], folded: Mapping[str, int]) -> None:
    """With the slash sorted first, whatever lies below a name follows it at once."""
    for name, below in pairwise(sorted(folded, key=lambda name: name.replace("/", "\0"))):
        if below.startswith(name + "/"):
            index = folded[below]
            raise invalid(
                f"{files[index].name!r} lies below a name that is itself a file.", f"files[{index}].name"
            )


def shard_of(name: str) -> tuple[tuple[str, int], int] | None:
    """Which set a file is a shard of (what its names begin with, and how many there are), and its number."""
    found = _SHARD.fullmatch(name)
    return None if found is None else ((found["stem"], int(found["count"])), int(found["number"]))


def _check_shards(names: Sequence[str]) -> None:
    sets: dict[tuple[str, int], set[int]] = {}
    for shard in map(shard_of, names):
        if shard is not None:
            sets.setdefault(shard[0], set()).add(shard[1])
    for (stem, count), present in sets.items():
        for number in range(1, count + 1):
            if number not in present:
                raise invalid(f"The shard {stem}-{number:05d}-of-{count:05d}.gguf is missing.", "files")
        if count == 0 or present != set(range(1, count + 1)):
            raise invalid(f"The shards of {stem!r} are not numbered 1 to {count}.", "files")
    if not any(name.lower().endswith(".gguf") for name in names):
        raise invalid("A gguf manifest has at least one .gguf file.", "files")


def require_sha256(text: str, param: str) -> str:
    """The digest, or Refused: a digest is never a path before it was checked."""
    if not SHA256.fullmatch(text):
        raise Refused("invalid_request", f"{param} is 64 lower-case hex characters.", param)
    return text
