"""Models from elsewhere: what a hub has, and downloads that the controller carries out and this command watches."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ficc.cli import output
from ficc.cli.output import Meter
from ficc.client.errors import ApiError
from ficc.domain.manifest import SHA256

if TYPE_CHECKING:
    from ficc.client.api import Api

LOOK_SECONDS = 0.5
READ_BYTES = 1 << 20
_HUB = re.compile(r"hub:(?P<repository>[^@:/\s]+/[^@:/\s]+)(@(?P<revision>[^:\s]+))?(:(?P<file>\S+))?")


@dataclass(frozen=True, slots=True)
class HubTarget:
    """hub:owner/name[@revision][:file]"""

    repository: str
    revision: str = "main"
    file: str | None = None


def hub_target(text: str) -> HubTarget:
    """Raises BadParameter."""
    found = _HUB.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not hub:owner/name[@revision][:file]")
    return HubTarget(found["repository"], found["revision"] or "main", found["file"])


async def preview(api: Api, target: HubTarget, licence: str | None = None) -> dict[str, Any]:
    wanted = {"repository": target.repository, "revision": target.revision}
    if target.file is not None:
        wanted["filename"] = target.file
    if licence is not None:
        wanted["licence"] = licence
    answer: dict[str, Any] = await api.call("POST", "/models/hub-preview", wanted)
    return answer


def show_preview(answer: dict[str, Any]) -> None:
    print(
        f"{answer['repository']} at {answer['commit']}  licence {answer['licence']['hub'] or 'not declared'}"
    )
    rows = []
    for one in answer["manifests"]:
        gguf, files = one["gguf"] or {}, one["manifest"]["files"]
        context, parameters = gguf.get("context_length"), gguf.get("parameters")
        rows.append(
            [
                one["manifest"]["name"],
                output.size(sum(file["bytes"] for file in files)),
                "-" if not parameters else f"{parameters / 1e6:,.0f} M",
                "-" if context is None else f"{context:,}",
                f"{output.size(one['estimate']['total_bytes'])} ({one['estimate']['basis']})",
                files[0]["name"],
            ]
        )
    output.show_table(
        ["NAME", "SIZE", "PARAMETERS", "CONTEXT", "MEMORY", "FILE"], rows, "No whole GGUF model."
    )
    for name in answer["projectors"]:
        output.say(f"Projector  {name}")
    for name in answer["incomplete"]:
        output.say(f"Missing    {name}: its set is not complete and cannot be used")
    output.say(f"Read {output.size(answer['bytes_read'])} of headers, nothing of the weights.")


def one_manifest(answer: dict[str, Any], target: HubTarget) -> dict[str, Any]:
    """Raises BadParameter with the choices where there are several."""
    manifests: Sequence[dict[str, Any]] = answer["manifests"]
    if len(manifests) == 1:
        chosen: dict[str, Any] = manifests[0]["manifest"]
        return chosen
    at = f"hub:{target.repository}" + (f"@{target.revision}" if target.revision != "main" else "")
    choices = "\n".join(f"  {at}:{one['manifest']['files'][0]['name']}" for one in manifests)
    raise typer.BadParameter(f"{target.repository} has {len(manifests)} models; name one:\n{choices}")


def url_manifest(url: str, sha256: str | None, size: int | None) -> dict[str, Any]:
    """The manifest of one file at a URL. Raises BadParameter without the digest of its publisher."""
    name = url.rsplit("/", 1)[-1]
    if sha256 is None:
        raise typer.BadParameter(
            f"a model is proved by its digest: give the publisher's with --sha256 DIGEST, or let {name} pass "
            "through this computer once with --hash-locally"
        )
    if not SHA256.fullmatch(sha256.lower()):
        raise typer.BadParameter("--sha256 is 64 hex characters, without a prefix")
    if size is None:
        size = asyncio.run(_size(url))
    return {"name": name, "bytes": size, "sha256": sha256.lower(), "url": url}


async def _size(url: str) -> int:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        try:
            async with session.head(url, allow_redirects=True) as answer:
                length = answer.headers.get("content-length", "")
        except aiohttp.ClientError:
            length = ""
    if not length.isdigit():
        raise typer.BadParameter("the size of that file is not told; give it with --bytes N")
    return int(length)


def fetched_here(url: str, folder: Path) -> Path:
    """The file, passed through this computer, for a URL whose digest nobody tells."""
    path = folder / url.rsplit("/", 1)[-1]
    asyncio.run(_fetch_here(url, path))
    return path


async def _fetch_here(url: str, path: Path) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        answer.raise_for_status()
        done = 0
        with Meter(path.name, answer.content_length or 0) as meter, path.open("wb") as file:
            async for piece in answer.content.iter_chunked(READ_BYTES):
                file.write(piece)
                done += len(piece)
                meter.at(done, "fetched")


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ficc-")


async def acquire(api: Api, model: dict[str, Any], *, wait: bool) -> dict[str, Any]:
    """Start or go on with a download, and watch it. Raises ApiError when it fails."""
    model = await api.call("POST", f"/models/{model['id']}/acquire")
    return await watch(api, model) if wait else model


async def watch(api: Api, model: dict[str, Any]) -> dict[str, Any]:
    """Until the model is ready, paused by somebody, or failed."""
    note = None
    with Meter(model["manifest"]["name"], model["bytes_total"]) as meter:
        while model["state"] in ("acquiring", "verifying", "pausing"):
            if model["state"] == "verifying":
                meter.at(sum(file["verified_bytes"] for file in model["files"]), "verified")
            else:
                meter.at(model["bytes_durable"])
            told = next((f"{f['name']}: {f['error']['message']}" for f in model["files"] if f["error"]), None)
            if told is not None and told != note:
                output.say(told)
            note = told
            await asyncio.sleep(LOOK_SECONDS)
            model = await api.call("GET", f"/models/{model['id']}")
        if model["state"] == "ready":
            meter.at(model["bytes_total"], "verified")
    if model["state"] == "failed":
        raise ApiError(422, {"error": model["error"]}, None)
    return model
