"""A stand-in for a model hub on a scripted source: its API's paths, shapes, paging, error codes, and weight files
behind a redirect to another host whose headers say what they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from support import source as sources
from support.source import Answer, Behaviour, Content, Request, Source

COMMIT = "a" * 40


class StandInHub:
    """`cdn`: the host name that weight files are redirected to."""

    def __init__(self, source: Source, cdn: str = "127.0.0.1") -> None:
        self.source = source
        self.cdn = cdn
        self.files: dict[str, bytes] = {}
        """What the content host serves, by its path."""

    @property
    def endpoint(self) -> str:
        return self.source.url("")

    def add(
        self,
        repository: str,
        files: Mapping[str, bytes],
        *,
        revision: str = "main",
        commit: str = COMMIT,
        licence: str | None = "apache-2.0",
        page: int = 1000,
        without_digest: tuple[str, ...] = (),
        renamed_to: str | None = None,
    ) -> None:
        """A public repository whose `revision` is at `commit`."""
        name = renamed_to or repository
        info = {
            "_id": "64b",
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "tags": ["gguf", *([] if licence is None else [f"license:{licence}"])],
            "cardData": {} if licence is None else {"license": licence},
            "siblings": [{"rfilename": path} for path in files],
        }
        for asked in {revision, commit}:
            path = f"/api/models/{repository}/revision/{quote(asked, safe='')}"
            if renamed_to is None:
                self._document(path, info)
            else:
                moved = f"/api/models/{renamed_to}/revision/{quote(asked, safe='')}"
                self.source.always(path, sources.redirect(self.source.url(moved), 307))
                self._document(moved, info)
        self._tree(name, commit, files, page, without_digest)
        for path, body in files.items():
            self._weights(name, commit, path, body)

    def fails(self, repository: str, status: int, error: str | None = None, **more: str) -> None:
        """What the hub says of a repository that this caller does not get."""
        headers = more if error is None else {"x_error_code": error, **more}
        body = json.dumps({"error": "no"}).encode()
        self.source.always(f"/api/models/{repository}/revision/main", sources.status(status, body, **headers))

    def _tree(
        self, name: str, commit: str, files: Mapping[str, bytes], page: int, without_digest: tuple[str, ...]
    ) -> None:
        entries: list[dict[str, Any]] = [{"type": "directory", "oid": "d" * 40, "size": 0, "path": "sub"}]
        for path, body in files.items():
            entry: dict[str, Any] = {"type": "file", "oid": "b" * 40, "size": len(body), "path": path}
            if path.endswith(".gguf") and path not in without_digest:
                digest = hashlib.sha256(body).hexdigest()
                entry["lfs"] = {"oid": digest, "size": len(body), "pointerSize": 134}
            entries.append(entry)
        base = f"/api/models/{name}/tree/{commit}?recursive=true"
        pages = [entries[at : at + page] for at in range(0, len(entries), page)]
        for number, shown in enumerate(pages):
            here = base if number == 0 else f"{base}&cursor={number}"
            more = {}
            if number + 1 < len(pages):
                more["link"] = f'<{self.source.url(f"{base}&cursor={number + 1}")}>; rel="next"'
            self._document(here, shown, **more)

    def _document(self, path: str, document: Any, **headers: str) -> None:
        body = json.dumps(document).encode()

        def answer(request: Request, content: Content, good: Answer) -> Answer:
            fields = {name.replace("_", "-"): value for name, value in headers.items()}
            return Answer(200, {"content-type": "application/json", **fields}, body)

        self.source.always(path, answer)

    def _weights(self, name: str, commit: str, path: str, body: bytes) -> None:
        """Facts stand on the redirect only; the target is signed and on another host."""
        digest = hashlib.sha256(body).hexdigest()
        signed = f"/cdn/{digest}?X-Signature={digest[:8]}&Expires=1"
        self.source.serve(signed, body, etag='"of the cdn"')
        facts = {
            "x_repo_commit": commit,
            "x_linked_etag": f'"{digest}"',
            "x_linked_size": str(len(body)),
        }
        redirect: Behaviour = sources.redirect(self.source.url(signed, self.cdn), 302, **facts)
        self.source.always(f"/{name}/resolve/{commit}/{quote(path)}", redirect)
