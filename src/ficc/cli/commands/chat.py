"""Talk to a service from the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ficc.cli import connection, output

if TYPE_CHECKING:
    from ficc.client.api import Api


def chat(
    alias: Annotated[str, typer.Argument(help="A service's alias or id.")],
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many tokens an answer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each piece as a JSON object.")] = False,
) -> None:
    """Chat with a service; the answer streams. Ctrl-C stops an answer, Ctrl-D ends the conversation."""

    async def work(api: Api) -> None:
        service = await connection.resolve(api, "/inference", alias, "alias")
        options = {} if max_tokens is None else {"max_tokens": max_tokens}
        messages: list[dict[str, str]] = []
        while (question := message or _ask()) is not None:
            messages.append({"role": "user", "content": question})
            answer = ""
            async for piece in api.chat(service["id"], messages, **options):
                answer += piece
                if as_json:
                    output.show_json({"content": piece})
                else:
                    print(piece, end="", flush=True)
            if not as_json:
                print()
            messages.append({"role": "assistant", "content": answer})
            if message is not None:
                return

    connection.with_api(work)


def _ask() -> str | None:
    """The next question, None at the end."""
    if sys.stdin.isatty():
        output.errors.print("> ", end="")
    line = sys.stdin.readline()
    return line.strip() if line else None
