"""A model hub's API, as much of it as a preview needs: a revision's commit, its files with their digests, and
the beginning of a file by range.

The hub answers about a weight file with a redirect to where its bytes are, and says what they are (digest,
size, commit) in the redirect's own headers. The token goes to the hub's own host only.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from ficc.controller.sources.https import Https, Response
from ficc.domain import fetching
from ficc.domain.errors import Refused
from ficc.domain.manifest import SHA256
from ficc.domain.repository import COMMIT, Entry
from ficc.protocol import strict_json

DOCUMENT_BYTES_MAX = 8 << 20
"""Of one answer of the hub's API."""
PAGES_MAX = 20
"""Pages of a repository's file list, of up to a thousand files each."""
SEARCH_RESULTS_MAX = 50
_NEXT = re.compile(r'<([^>]{1,2048})>;\s*rel="next"')


@dataclass(frozen=True, slots=True)
class Revision:
    repository: str
    """As the hub calls it now: a renamed one has its new name."""
    commit: str
    licence: str | None


class Hub:
    """Every call raises Refused: `repository_not_found`, `repository_gated`, `hub_rate_limited`,
    `source_unavailable`, `source_refused`, `stalled`."""

    def __init__(self, https: Https, endpoint: str, token: str | None) -> None:
        self._https = https
        self._endpoint = endpoint.rstrip("/")
        self._token = token

    def credential(self, url: str) -> str | None:
        """What a request for this URL is to be authorised with: the token, at the hub itself."""
        return f"Bearer {self._token}" if self._token is not None and self._is_own(url) else None

    def _is_own(self, url: str) -> bool:
        """Whether a URL is on the hub's own scheme, host and port."""
        return urlsplit(url)[:2] == urlsplit(self._endpoint)[:2]

    def file_url(self, repository: str, commit: str, path: str) -> str:
        """Where the bytes of a file are, for good."""
        return f"{self._endpoint}/{repository}/resolve/{commit}/{quote(path)}"

    async def revision(self, repository: str, revision: str) -> Revision:
        url = f"{self._endpoint}/api/models/{repository}/revision/{quote(revision, safe='')}"
        document, _ = await self._document(url, repository)
        commit, name = document.get("sha"), document.get("id")
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise _strange("names no commit for that revision")
        return Revision(name if isinstance(name, str) else repository, commit, _licence(document))

    async def files(self, repository: str, commit: str) -> list[Entry]:
        url = f"{self._endpoint}/api/models/{repository}/tree/{commit}?recursive=true"
        found: list[Entry] = []
        for _ in range(PAGES_MAX):
            page, headers = await self._document(url, repository)
            if not isinstance(page, list):
                raise _strange("lists no files")
            found += [entry for one in page if (entry := _entry(one)) is not None]
            following = _NEXT.search(headers.get("link", ""))
            if following is None:
                return found
            url = self._next(url, following[1])
        raise Refused("source_unavailable", f"The repository has more than {PAGES_MAX} pages of files.")

    def _next(self, here: str, link: str) -> str:
        url = urljoin(here, link)
        if not self._is_own(url):
            raise Refused("source_refused", "The hub's next page is on another host.")
        return url

    async def search(self, text: str) -> list[Mapping[str, Any]]:
        url = (
            f"{self._endpoint}/api/models?search={quote(text, safe='')}&filter=gguf&sort=downloads"
            f"&limit={SEARCH_RESULTS_MAX}"
        )
        page, _ = await self._document(url, text)
        if not isinstance(page, list):
            raise _strange("lists no repositories")
        return [one for one in page if isinstance(one, dict) and isinstance(one.get("id"), str)]

    @asynccontextmanager
    async def part(
        self, repository: str, commit: str, entry: Entry, wanted: fetching.Wanted
    ) -> AsyncIterator[tuple[Response, fetching.Body]]:
        """Some bytes of a file, and which they are; what the hub says of the file on the way is checked.
        Raises Refused `range_unsupported` too."""
        url = self.file_url(repository, commit, entry.path)
        credential = self.credential(url)
        async with self._https.open(url, headers=wanted.headers, credential=credential) as response:
            if response.status not in (200, 206):
                await self._refuse(response, repository)
            for said in response.redirect_headers:
                _check_said(said, commit, entry)
            answer = fetching.check_answer(wanted, response.status, response.headers, now=0.0)
            if not isinstance(answer, fetching.Body):
                raise Refused(answer.reason.code, answer.reason.message)
            yield response, answer

    async def _document(self, url: str, repository: str) -> tuple[Any, Mapping[str, str]]:
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        async with self._https.open(url, headers=headers, credential=self.credential(url)) as response:
            if response.status != 200:
                await self._refuse(response, repository)
            body = await response.read(DOCUMENT_BYTES_MAX)
        try:
            return strict_json.parse(body), response.headers
        except strict_json.NotJson:
            raise _strange("sends something that is no JSON") from None

    async def _refuse(self, response: Response, repository: str) -> None:
        """Raises what the hub's status and error code mean."""
        code = response.headers.get("x-error-code", "")
        if response.status == 429:
            wait = fetching.wait_of(response.headers, now=0.0)
            raise Refused(
                "hub_rate_limited",
                "The hub takes no more requests for now"
                + ("." if self._token else "; with a token (hub.token_file) it takes more."),
                retry_after_seconds=max(1, round(wait)),
            )
        if code == "GatedRepo" or response.status == 403:
            raise Refused(
                "repository_gated",
                f"{repository} is gated: accept its terms on the hub, and name a token of that account in "
                "hub.token_file.",
                "repository",
            )
        if code == "RevisionNotFound":
            raise Refused("repository_not_found", f"{repository} has no such revision.", "revision")
        if code == "EntryNotFound":
            raise Refused("repository_not_found", f"{repository} has no such file any more.", "filename")
        if response.status in (401, 404):
            private = "" if self._token else " (or it is private, and hub.token_file names no token)"
            raise Refused(
                "repository_not_found", f"The hub has no repository {repository}{private}.", "repository"
            )
        raise Refused("source_unavailable", f"The hub answers with status {response.status}.")


def _entry(document: Any) -> Entry | None:
    """One file of a tree; None for a directory, or for what is no entry at all."""
    if not isinstance(document, dict) or document.get("type") != "file":
        return None
    path, size, lfs = document.get("path"), document.get("size"), document.get("lfs")
    if not isinstance(path, str) or not isinstance(size, int):
        return None
    if not isinstance(lfs, dict):
        return Entry(path, size, None)
    digest, whole = lfs.get("oid"), lfs.get("size", size)
    known = isinstance(digest, str) and SHA256.fullmatch(digest) is not None
    return Entry(path, whole if isinstance(whole, int) else size, digest if known else None)


def _licence(document: Mapping[str, Any]) -> str | None:
    card = document.get("cardData")
    licence = card.get("license") if isinstance(card, dict) else None
    if isinstance(licence, str):
        return licence
    tags = document.get("tags")
    for tag in tags if isinstance(tags, list) else []:
        if isinstance(tag, str) and tag.startswith("license:"):
            return tag.removeprefix("license:")
    return None


def _check_said(said: Mapping[str, str], commit: str, entry: Entry) -> None:
    """What a redirect's own headers say of the bytes behind it."""
    for name, expected in (
        ("x-repo-commit", commit),
        ("x-linked-size", str(entry.bytes)),
        ("x-linked-etag", entry.sha256),
    ):
        found = said.get(name)
        if found is not None and expected is not None and found.strip('"') != expected:
            raise Refused(
                "source_mismatch",
                f"The hub says {name}: {found[:80]} of {entry.path!r}, and {expected} in its list of files.",
            )


def _strange(what: str) -> Refused:
    return Refused("source_unavailable", f"The hub {what}; is hub.endpoint a model hub's?")
