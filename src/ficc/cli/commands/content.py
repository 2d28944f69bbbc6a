"""Content: list what is stored, and remove what no model refers to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc.cli import connection, output
from ficc.cli.options import Json, Yes, confirm, group

if TYPE_CHECKING:
    from ficc.client.api import Api

app = group("Content: the bytes of models as they are stored.")

DIGEST_SHOWN = 16
"""Characters of a digest in a table."""


@app.command("list")
def list_content(as_json: Json = False) -> None:
    """Blobs and partials of the project, newest first."""

    async def work(api: Api) -> list[dict[str, Any]]:
        return [content async for content in api.every("/content")]

    contents = connection.with_api(work)
    if as_json:
        output.show_json({"items": contents, "next": None})
        return
    rows = [
        [
            content["sha256"][:DIGEST_SHOWN],
            content["state"],
            f"{output.size(content['offset'])} of {output.size(content['bytes'])}",
            len(content["references"]),
            "yes" if content["shared"] else "no",
            content["last_used_at"],
        ]
        for content in contents
    ]
    output.show_table(
        ["SHA256", "STATE", "DURABLE", "MODELS", "SHARED", "LAST USED"], rows, "No content yet."
    )


@app.command()
def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove what no model of the project refers to. Bytes that another project has stay for it."""
    if not dry_run and not yes:
        confirm(f"{_said(_prune(dry_run=True), 'Remove')}?", yes)
    pruned = _prune(dry_run=dry_run)
    if as_json:
        output.show_json(pruned)
    else:
        output.say(f"{_said(pruned, 'Would remove' if dry_run else 'Removed')}.")


def _prune(*, dry_run: bool) -> dict[str, Any]:
    found: dict[str, Any] = connection.with_api(
        lambda api: api.call("POST", "/content/prune", {"dry_run": dry_run})
    )
    return found


def _said(pruned: dict[str, Any], verb: str) -> str:
    freed, kept = output.size(pruned["bytes_freed"]), output.size(pruned["bytes_retained_shared"])
    return (
        f"{verb} {pruned['count']} contents that no model has: {freed} freed, {kept} kept by other projects"
    )
