"""Tokens of the project."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ficc.cli import connection, output
from ficc.cli.failure import usage
from ficc.cli.options import Json, Yes, confirm, group

if TYPE_CHECKING:
    from ficc.client.api import Api

app = group("Tokens: credentials for programs.")


Limit = Annotated[
    int | None, typer.Option(min=0, help="Of its inference; 0: none. By default the installation's.")
]
Out = Annotated[Path | None, typer.Option(help="Write the secret to a new file instead of printing it.")]


@contextmanager
def secret_file(path: Path | None) -> Iterator[TextIO | None]:
    """A new file that only its owner reads, there before the secret is: a credential that was made must not be
    lost for want of a place. It goes again when nothing came of it. Raises Failure."""
    if path is None:
        yield None
        return
    try:
        file = open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115
    except FileExistsError:
        raise usage(f"{path} exists already; name a new file with --out.") from None
    except OSError as error:
        raise usage(f"{path} cannot be written: {error.strerror}.") from None
    try:
        with file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@app.command()
def create(
    label: str,
    scope: Annotated[list[str], typer.Option(help="A scope; may be given several times.")],
    lifetime_seconds: Annotated[int | None, typer.Option(help="For ever when left out.")] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    concurrency: Limit = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Make a token with some of your own scopes. It is shown once."""
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
    }
    body = {"label": label, "scopes": scope, "lifetime_seconds": lifetime_seconds, "limits": limits}
    with secret_file(out) as file:
        made = connection.with_api(lambda api: api.call("POST", "/tokens", body))
        show_once(made, file, as_json=as_json)


def show_once(made: dict[str, Any], file: TextIO | None, *, as_json: bool) -> None:
    if file is not None:
        file.write(made["token"] + "\n")
        output.say(f"Written to {file.name}, readable by you alone.")
    elif as_json:
        output.show_json(made)
    else:
        print(made["token"])
        output.say("Shown once. Store it now.")


@app.command("list")
def list_tokens(as_json: Json = False) -> None:
    """Tokens of the project, without their secrets."""

    async def work(api: Api) -> list[dict[str, Any]]:
        return [token async for token in api.every("/tokens")]

    tokens = connection.with_api(work)
    if as_json:
        output.show_json({"items": tokens, "next": None})
        return
    rows = [
        [t["label"], t["id"], t["prefix"] + "…", " ".join(t["scopes"]), t["expires_at"], t["last_used_at"]]
        for t in tokens
    ]
    output.show_table(["LABEL", "ID", "PREFIX", "SCOPES", "EXPIRES", "LAST USED"], rows, "No tokens.")


@app.command()
def revoke(token: str, yes: Yes = False, as_json: Json = False) -> None:
    """Revoke a token at once; answers under way with it end."""
    confirm(f"Revoke {token}? Programs that use it stop working.", yes)

    async def work(api: Api) -> Any:
        found = await connection.resolve(api, "/tokens", token, "label")
        return await api.call("DELETE", f"/tokens/{found['id']}")

    revoked = connection.with_api(work)
    if as_json:
        output.show_json(revoked)
    else:
        output.say("Revoked.")
