"""Models: add, preview, acquire, upload, read, remove."""

from __future__ import annotations

import asyncio
import os
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc.cli import connection, files, output
from ficc.cli.commands import sources
from ficc.cli.options import Json, Wait, Yes, confirm, group
from ficc.cli.output import Meter
from ficc.client.errors import ApiError
from ficc.domain.errors import Refused
from ficc.domain.upload import OCTET_STREAM_BYTES_MAX

if TYPE_CHECKING:
    from ficc.client.api import Api

app = group("Models: files that are verified byte by byte.")

RETRY_SECONDS = 1.0
FORMATS = {".gguf": "gguf", ".safetensors": "safetensors"}


class Capability(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"


@app.command()
def add(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE… | URL | hub:OWNER/NAME[@REVISION][:FILE]",
            help="The model's files, or where it is.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="By default the first file's name.")] = None,
    capability: Annotated[
        list[Capability] | None, typer.Option(help="What it is for; may be given more than once.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Such as apache-2.0.")] = None,
    upload_bytes: Annotated[
        bool, typer.Option("--upload", help="Send the bytes over HTTP in any case.")
    ] = False,
    sha256: Annotated[str | None, typer.Option(help="Of a URL: the publisher's digest.")] = None,
    size: Annotated[
        int | None, typer.Option("--bytes", min=0, help="Of a URL, where it tells no size.")
    ] = None,
    hash_locally: Annotated[
        bool, typer.Option("--hash-locally", help="Of a URL: fetch it to this computer, hash and upload it.")
    ] = False,
    wait: Wait = True,
    as_json: Json = False,
) -> None:
    """Register a model and bring its bytes: from files here, a URL, or a hub. Run again, it continues."""
    described = _described(name, capability, licence)
    first = targets[0]
    if not first.startswith(("hub:", "https://")):
        model = _add_files(_paths(targets), described, upload_bytes)
    elif len(targets) > 1:
        raise typer.BadParameter("one URL or hub model at a time")
    elif first.startswith("https://") and hash_locally:
        with sources.temporary() as folder:
            model = _add_files([sources.fetched_here(first, Path(folder))], described, upload_bytes)
    else:
        model = _add_remote(first, described, sha256, size, wait=wait)
    if as_json:
        output.show_json(model)
    elif model["state"] != "ready":
        print(f"{model['state'].capitalize()}  {model['manifest']['name']}  {model['id']}")
    else:
        print(f"Ready  {model['manifest']['name']}  {model['id']}")
        output.say(f"Next   ficc service create ALIAS --model {shlex.quote(model['manifest']['name'])}")


def _described(name: str | None, capability: list[Capability] | None, licence: str | None) -> dict[str, Any]:
    """What the command line says of a model, whatever its source says."""
    capabilities = [one.value for one in capability or []]
    given = {"name": name, "capabilities": capabilities, "licence": licence}
    return {member: value for member, value in given.items() if value}


def _paths(targets: list[str]) -> list[Path]:
    paths = [Path(target) for target in targets]
    for path in paths:
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {path}")
    return paths


def _add_files(paths: list[Path], described: dict[str, Any], upload_bytes: bool) -> dict[str, Any]:
    manifest = _manifest(paths) | described

    async def work(api: Api) -> dict[str, Any]:
        model = await api.call("POST", "/models", manifest)
        incoming = None if upload_bytes else _local_incoming(api)
        return await _bring(api, model, paths, incoming)

    return connection.with_api(work)


def _add_remote(
    target: str, described: dict[str, Any], sha256: str | None, size: int | None, *, wait: bool
) -> dict[str, Any]:
    """A model that the controller fetches itself."""
    hub = sources.hub_target(target) if target.startswith("hub:") else None
    file = None if hub is not None else sources.url_manifest(target, sha256, size)

    async def work(api: Api) -> dict[str, Any]:
        if hub is not None:
            answer = await sources.preview(api, hub, described.get("licence"))
            manifest = sources.one_manifest(answer, hub)
        else:
            assert file is not None
            manifest = {
                "name": Path(file["name"]).stem.lower(),
                "format": _format(file["name"]),
                "files": [file],
            }
        model = await api.call("POST", "/models", manifest | described)
        return await sources.acquire(api, model, wait=wait)

    return connection.with_api(work)


def _format(name: str) -> str:
    suffix = Path(name).suffix.lower()
    if suffix not in FORMATS:
        raise typer.BadParameter(f"files end in {' or '.join(FORMATS)}")
    return FORMATS[suffix]


def _manifest(paths: list[Path]) -> dict[str, Any]:
    form = _format(paths[0].name)
    entries = []
    for path in paths:
        size = path.stat().st_size
        with Meter(path.name, size) as meter:
            digest = files.sha256(path, lambda done, meter=meter: meter.at(done, "hashed"))  # type: ignore[misc]
        entries.append({"name": path.name, "bytes": size, "sha256": digest})
    return {"name": paths[0].stem.lower(), "format": form, "files": entries}


def _local_incoming(api: Api) -> Path | None:
    """The store's incoming directory, if the controller is this machine's own and it can be written."""
    if os.environ.get("FICC_URL"):
        return None
    incoming = connection.settings().content_directory / "incoming"
    return incoming if os.access(incoming, os.W_OK | os.X_OK) else None


async def _bring(api: Api, model: dict[str, Any], paths: list[Path], incoming: Path | None) -> dict[str, Any]:
    for file in model["files"]:
        if file["state"] == "verified":
            continue
        path = paths[file["index"]]
        with Meter(path.name, file["bytes"]) as meter:
            if incoming is None:
                await _upload(api, model["id"], file, path, meter)
            else:
                placed = await asyncio.to_thread(
                    files.place,
                    path,
                    incoming,
                    lambda done: meter.at(done, "copied"),
                )
                meter.at(file["bytes"], "verifying")
                await api.call("POST", f"/models/{model['id']}/files/{file['index']}/adopt", {"name": placed})
            await _verified(api, model["id"], file["index"], meter)
    found: dict[str, Any] = await api.call("GET", f"/models/{model['id']}")
    return found


async def _upload(api: Api, model_id: str, file: dict[str, Any], path: Path, meter: Meter) -> None:
    """Pieces at the durable offset, which the server may correct."""
    offset, size = file["offset"], file["bytes"]
    with path.open("rb") as source:
        while True:
            meter.at(offset)
            source.seek(offset)
            piece = source.read(min(OCTET_STREAM_BYTES_MAX, size - offset))
            try:
                answer = await api.upload(model_id, file["index"], offset, piece)
            except ApiError as error:
                if error.code == "offset_mismatch":
                    offset = error.beside["offset"]
                    continue
                if error.code in ("upload_busy", "model_busy"):
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                raise
            offset = answer["offset"]
            if offset == size:
                meter.at(offset, answer["state"])
                return


async def _verified(api: Api, model_id: str, index: int, meter: Meter) -> None:
    """Until the file is verified. Raises ApiError for one that is not what it should be."""
    while True:
        model = await api.call("GET", f"/models/{model_id}")
        file = model["files"][index]
        if file["state"] == "verified":
            meter.at(file["bytes"], "verified")
            return
        if file["state"] == "failed":
            raise ApiError(422, {"error": file["error"]}, None)
        meter.at(file["verified_bytes"], "verified")
        await asyncio.sleep(RETRY_SECONDS)


@app.command()
def upload(
    model: str,
    paths: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
    as_json: Json = False,
) -> None:
    """Send the bytes of a registered model's files, in the manifest's order, from where they stand."""

    async def work(api: Api) -> dict[str, Any]:
        found = await connection.resolve(api, "/models", model, "manifest.name")
        if len(paths) != len(found["files"]):
            raise LookupError(f"The model has {len(found['files'])} files; name them all, in order.")
        return await _bring(api, found, paths, None)

    done = connection.with_api(work)
    if as_json:
        output.show_json(done)
    else:
        print(f"Ready  {done['manifest']['name']}  {done['id']}")


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """Models of the project, newest first."""

    async def work(api: Api) -> list[dict[str, Any]]:
        return [model async for model in api.every("/models")]

    models = connection.with_api(work)
    if as_json:
        output.show_json({"items": models, "next": None})
        return
    rows = [
        [
            model["manifest"]["name"],
            model["id"],
            model["state"],
            f"{output.size(model['bytes_durable'])} of {output.size(model['bytes_total'])}",
            ", ".join(model["manifest"].get("capabilities", ["chat"])),
        ]
        for model in models
    ]
    output.show_table(
        ["NAME", "ID", "STATE", "DURABLE", "CAPABILITIES"], rows, "No models yet: ficc model add FILE.gguf"
    )


@app.command()
def preview(
    target: Annotated[str, typer.Argument(metavar="hub:OWNER/NAME[@REVISION][:FILE]")],
    as_json: Json = False,
) -> None:
    """What a hub's repository holds, and the memory it would need, before anything is fetched."""
    wanted = sources.hub_target(target)
    answer = connection.with_api(lambda api: sources.preview(api, wanted))
    if as_json:
        output.show_json(answer)
    else:
        sources.show_preview(answer)


@app.command()
def acquire(model: str, wait: Wait = True, as_json: Json = False) -> None:
    """Fetch what is missing of a registered model from its sources, or go on with it."""

    async def work(api: Api) -> dict[str, Any]:
        found = await connection.resolve(api, "/models", model, "manifest.name")
        return await sources.acquire(api, found, wait=wait)

    _show_state(connection.with_api(work), as_json)


@app.command()
def pause(model: str, wait: Wait = True, as_json: Json = False) -> None:
    """End a download after the write that is under way; acquire goes on from there."""

    async def work(api: Api) -> dict[str, Any]:
        found = await connection.resolve(api, "/models", model, "manifest.name")
        paused = await api.call("POST", f"/models/{found['id']}/pause")
        return await sources.watch(api, paused) if wait else paused

    _show_state(connection.with_api(work), as_json)


def _show_state(model: dict[str, Any], as_json: bool) -> None:
    if as_json:
        output.show_json(model)
    else:
        durable, total = output.size(model["bytes_durable"]), output.size(model["bytes_total"])
        print(f"{model['state'].capitalize()}  {model['manifest']['name']}  {durable} of {total}")


@app.command()
def show(model: str, as_json: Json = False) -> None:
    """One model with its files."""
    found = connection.with_api(lambda api: connection.resolve(api, "/models", model, "manifest.name"))
    if as_json:
        output.show_json(found)
        return
    print(f"{found['manifest']['name']}  {found['id']}  {found['state']}")
    print(f"revision {found['revision']}")
    if found["error"]:
        print(f"{found['error']['code']}: {found['error']['message']}")
    for file in found["files"]:
        print(
            f"  {file['name']}  {file['state']}  {file['offset']} of {file['bytes']}  sha256 {file['sha256']}"
        )


@app.command()
def remove(
    model: str,
    evict: Annotated[bool, typer.Option("--evict", help="Also free bytes that nothing else needs.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove a model that no service refers to. Without --evict its verified bytes stay."""

    async def find(api: Api) -> tuple[str, dict[str, Any] | None]:
        found = await connection.resolve(api, "/models", model, "manifest.name")
        ask = evict and not yes
        return found["id"], await api.call("GET", f"/models/{found['id']}/eviction") if ask else None

    model_id, eviction = connection.with_api(find)
    confirm(_question(model, eviction), yes)
    query = {"evict": "true"} if evict else None
    removed = connection.with_api(lambda api: api.call("DELETE", f"/models/{model_id}", query=query))
    if as_json:
        output.show_json(removed)
        return
    freed, kept = removed["bytes_freed"], removed["bytes_retained_shared"]
    output.say(f"Removed. {output.size(freed)} freed, {output.size(kept)} kept.")


def _question(model: str, eviction: dict[str, Any] | None) -> str:
    """What is about to be done. Raises Refused where it is known to be forbidden."""
    if eviction is None:
        return f"Remove {model}?"
    if eviction["reason"] is not None:
        raise Refused(eviction["reason"]["code"], eviction["reason"]["message"])
    freed, kept = eviction["bytes_freed"], eviction["bytes_retained_shared"]
    shared = f" {output.size(kept)} that others share stay." if kept else ""
    return f"Remove {model} and free {output.size(freed)}?{shared}"
