"""Models: add, upload, read, remove."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc.cli import connection, files, output
from ficc.cli.options import Json, Yes, confirm, group
from ficc.cli.output import Meter
from ficc.client.errors import ApiError
from ficc.domain.upload import OCTET_STREAM_BYTES_MAX

if TYPE_CHECKING:
    from ficc.client.api import Api

app = group("Models: files that are verified byte by byte.")

RETRY_SECONDS = 1.0
FORMATS = {".gguf": "gguf", ".safetensors": "safetensors"}


@app.command()
def add(
    paths: Annotated[list[Path], typer.Argument(help="The model's files.", exists=True, dir_okay=False)],
    name: Annotated[str | None, typer.Option(help="By default the first file's name.")] = None,
    capability: Annotated[
        list[str] | None, typer.Option(help="chat or embeddings; may be given twice.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Such as apache-2.0.")] = None,
    upload_bytes: Annotated[
        bool, typer.Option("--upload", help="Send the bytes over HTTP in any case.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Register local files as a model and bring their bytes. Run again, it continues."""
    manifest = _manifest(paths, name, capability, licence)

    async def work(api: Api) -> dict[str, Any]:
        model = await api.call("POST", "/models", manifest)
        incoming = None if upload_bytes else _local_incoming(api)
        return await _bring(api, model, paths, incoming)

    model = connection.with_api(work)
    if as_json:
        output.show_json(model)
    else:
        print(f"Ready  {model['manifest']['name']}  {model['id']}")
        output.say(f"Next   ficc service create ALIAS --model {model['manifest']['name']}")


def _manifest(
    paths: list[Path], name: str | None, capability: list[str] | None, licence: str | None
) -> dict[str, Any]:
    suffix = paths[0].suffix.lower()
    if suffix not in FORMATS:
        raise typer.BadParameter(f"files end in {' or '.join(FORMATS)}")
    entries = []
    for path in paths:
        size = path.stat().st_size
        with Meter(path.name, size) as meter:
            digest = files.sha256(path, lambda done, meter=meter: meter.at(done, "hashed"))  # type: ignore[misc]
        entries.append({"name": path.name, "bytes": size, "sha256": digest})
    manifest: dict[str, Any] = {
        "name": name or paths[0].stem.lower(),
        "format": FORMATS[suffix],
        "files": entries,
    }
    if capability:
        manifest["capabilities"] = capability
    if licence:
        manifest["licence"] = licence
    return manifest


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
def remove(model: str, yes: Yes = False, as_json: Json = False) -> None:
    """Remove a model that no service refers to. Its bytes stay."""
    confirm(f"Remove {model}?", yes)

    async def work(api: Api) -> Any:
        found = await connection.resolve(api, "/models", model, "manifest.name")
        return await api.call("DELETE", f"/models/{found['id']}")

    removed = connection.with_api(work)
    if as_json:
        output.show_json(removed)
    else:
        output.say("Removed.")
