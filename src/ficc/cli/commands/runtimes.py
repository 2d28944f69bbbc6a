"""Runtime images on this machine: build, import, list, digest, remove. They work on its image store themselves;
the executor finds there what they did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc.cli import connection, output
from ficc.cli.options import Json, Yes, confirm, group
from ficc.domain.errors import Refused

if TYPE_CHECKING:
    from ficc.images.store import ImageStore

app = group("Runtime images: what a sandbox is made of.")

RECIPES = ("llama-cpp",)


def _store() -> ImageStore:
    from ficc.images.store import ImageStore

    return ImageStore(connection.settings().images_directory)


@app.command()
def build(
    recipe: Annotated[str, typer.Argument(help="llama-cpp")],
    suite: Annotated[
        str | None, typer.Option(help="Release of Debian or Ubuntu; this machine's own by default.")
    ] = None,
    mirror: Annotated[str | None, typer.Option(help="Package mirror, for closed networks.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where downloads are kept.")] = None,
    wheel: Annotated[
        Path | None,
        typer.Option(
            help="The pinned wheel's file, for a machine that reaches no package index.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    rebuild: Annotated[bool, typer.Option(help="Build even if the same was built before.")] = False,
    as_json: Json = False,
) -> None:
    """Build a runtime image and import it, checked."""
    if recipe not in RECIPES:
        raise typer.BadParameter(f"the recipes are {', '.join(RECIPES)}")
    from ficc.images.build import build_llama_cpp

    settings = connection.settings()
    cache_directory = cache or settings.state_directory / "cache"
    cache_directory.mkdir(parents=True, exist_ok=True)
    settings.images_directory.mkdir(parents=True, exist_ok=True)
    record = build_llama_cpp(
        _store(),
        work_dir=settings.build_directory,
        cache_dir=cache_directory,
        progress=output.say,
        suite=suite,
        mirror=mirror,
        wheel=wheel,
        rebuild=rebuild,
    )
    if as_json:
        output.show_json(record.as_json())
    else:
        print(record.image_digest)


@app.command("import")
def import_image(
    path: Annotated[
        Path, typer.Argument(help="An OCI image layout: a directory or a tar archive.", exists=True)
    ],
    as_json: Json = False,
) -> None:
    """Import an image made elsewhere, with every hash checked."""
    record = _store().import_layout(path)
    if as_json:
        output.show_json(record.as_json())
    else:
        print(record.image_digest)


@app.command("list")
def list_images(as_json: Json = False) -> None:
    """The images imported on this machine."""
    records = _store().list()
    if as_json:
        output.show_json({"items": [record.as_json() for record in records], "next": None})
        return
    rows: list[list[Any]] = [
        [record.name, record.image_digest, output.size(record.bytes), record.created_at] for record in records
    ]
    output.show_table(
        ["NAME", "DIGEST", "SIZE", "IMPORTED"], rows, "No images yet: ficc runtime build llama-cpp"
    )


@app.command()
def digest(
    name: Annotated[str, typer.Argument(help="An image's name, or the end of it.")], as_json: Json = False
) -> None:
    """The digest of the newest image of a name."""
    for record in _store().list():
        if record.name == name or record.name.endswith("/" + name):
            if as_json:
                output.show_json({"name": record.name, "image_digest": record.image_digest})
            else:
                print(record.image_digest)
            return
    raise Refused("image_not_found", f"No image called {name!r} was imported; see `ficc runtime list`.")


@app.command()
def remove(
    image_digest: Annotated[str, typer.Argument(metavar="DIGEST", help="As `ficc runtime list` shows it.")],
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove an image from this machine. Refused while a sandbox runs from it."""
    from ficc.images.usage import processes_of

    record = _store().get(image_digest)
    if processes_of(image_digest):
        raise Refused("image_in_use", "A sandbox runs from this image; stop its service first.")
    confirm(f"Remove {record.name} ({output.size(record.bytes)})? Services that name it will not start.", yes)
    _store().remove(image_digest)
    if as_json:
        output.show_json({"removed": True, "image_digest": image_digest, "bytes_freed": record.bytes})
    else:
        print(f"Removed  {image_digest}  ({output.size(record.bytes)})")
