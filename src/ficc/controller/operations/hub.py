"""Previews of a hub's repositories: manifests, the models' own description of themselves, and an estimate of the
memory they need, before a byte of their weights is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ficc.controller.sources.hub import Hub, Revision
from ficc.domain import estimate, fetching
from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.manifest import manifest
from ficc.domain.repository import (
    Entry,
    Group,
    check_repository,
    check_revision,
    digests,
    gguf_groups,
    of_file,
)
from ficc.protocol.gguf import Reader
from ficc.protocol.gguf_header import Header

HEADERS_MAX = 4
"""Of how many models of one repository the headers are read, when none is named: each is some megabytes."""
STEP_BYTES = 64 << 10
"""The least that is asked for at a time, so at most this much beyond a header is read."""
PREVIEW_CONTEXT = 4096
PREVIEW_CONCURRENCY = 1
NAME_CHARACTERS_MAX = 256


@dataclass(slots=True)
class _Read:
    """How much of files was read."""

    count: int = 0


class HubPreviews:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def search(self, actor: Actor, text: str) -> list[dict[str, Any]]:
        actor.require("models:manage")
        return [
            {
                "repository": one["id"],
                "downloads": one.get("downloads") if isinstance(one.get("downloads"), int) else None,
                "gated": bool(one.get("gated")),
            }
            for one in await self._hub.search(text)
        ]

    async def preview(
        self, actor: Actor, repository: str, revision: str, filename: str | None, licence: str | None
    ) -> dict[str, Any]:
        """The models of a repository at a revision; with `filename`, the one it is part of. Raises Refused as
        `Hub` does, and `content_hash_missing`, `model_header_refused`."""
        actor.require("models:manage")
        check_repository(repository)
        check_revision(revision)
        found = await self._hub.revision(repository, revision)
        groups = gguf_groups(await self._hub.files(found.repository, found.commit))
        chosen = groups.models if filename is None else (of_file(groups, filename),)
        if not chosen:
            raise Refused(
                "not_found",
                f"{found.repository} has no whole GGUF model"
                + (f"; it lacks {groups.incomplete[0]}." if groups.incomplete else "."),
                "repository",
            )
        proved = [(group, digests(group)) for group in chosen]
        read = _Read()
        manifests = []
        for number, (group, sha256s) in enumerate(proved):
            shards = group.files if number < HEADERS_MAX else ()
            headers = [await self._header(found, entry, read) for entry in shards]
            manifests.append(self._described(found, group, sha256s, headers, licence))
        return {
            "repository": found.repository,
            "requested_revision": revision,
            "commit": found.commit,
            "licence": {"declared": licence, "hub": found.licence},
            "manifests": manifests,
            "projectors": [entry.path for entry in groups.projectors],
            "incomplete": list(groups.incomplete),
            "bytes_read": read.count,
        }

    def _described(
        self,
        found: Revision,
        group: Group,
        sha256s: Sequence[str],
        headers: Sequence[Header],
        licence: str | None,
    ) -> dict[str, Any]:
        """`headers` are those of the files, the one that describes the model first; or none."""
        described = headers[0] if headers else None
        document: dict[str, Any] = {
            "name": group.name.rsplit("/", 1)[-1].lower()[:NAME_CHARACTERS_MAX],
            "format": "gguf",
            "licence": licence or found.licence,
            "source": {"kind": "hub", "repository": found.repository, "revision": found.commit},
            "files": [
                {
                    "name": entry.path,
                    "bytes": entry.bytes,
                    "sha256": sha256,
                    "url": self._hub.file_url(found.repository, found.commit, entry.path),
                }
                for entry, sha256 in zip(group.files, sha256s, strict=True)
            ],
        }
        if described is not None and described.capabilities:
            document["capabilities"] = list(described.capabilities)
        gguf = None
        if described is not None:
            parameters = sum(header.parameters for header in headers)
            gguf = {**described.as_json(), "parameters": parameters}
        return {
            "manifest": manifest(document).as_json(),
            "gguf": gguf,
            "estimate": _estimate(group, described).in_full(),
        }

    async def _header(self, found: Revision, entry: Entry, read: _Read) -> Header:
        """By range, a step at a time: no more is asked for than the header certainly has, or one step."""
        reader, at = Reader(file_bytes=entry.bytes), 0
        while not reader.done and at < entry.bytes:
            wanted = fetching.Wanted(at, min(entry.bytes, at + max(reader.need, STEP_BYTES)), entry.bytes)
            async with self._hub.part(found.repository, found.commit, entry, wanted) as (response, body):
                async for piece in response.chunks():
                    read.count += len(piece)
                    piece = piece[: body.end - at]
                    at += len(piece)
                    reader.feed(piece)
                    if reader.done or at >= body.end:
                        break
        return reader.end()


def _estimate(group: Group, header: Header | None) -> estimate.Estimate:
    weights = sum(entry.bytes for entry in group.files)
    if header is None or header.shape is None:
        return estimate.from_file_sizes(weights)
    context = min(PREVIEW_CONTEXT, header.shape.context_length or PREVIEW_CONTEXT)
    return estimate.from_shape(
        header.shape,
        weights,
        context=context,
        concurrency=PREVIEW_CONCURRENCY,
        capabilities=header.capabilities or ("chat",),
    )
