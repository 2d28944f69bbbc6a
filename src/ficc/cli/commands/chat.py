"""Talk to a service from the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ficc.cli import connection, output

if TYPE_CHECKING:
    from ficc.client.api import Api


def chat(
    alias: Annotated[str, typer.Argument(help="A service's alias or id.")],
    message: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many tokens an answer.", min=1)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each piece as a JSON object.")] = False,
) -> None:
    """Chat with a service; the answer streams. Ctrl-C stops an answer, Ctrl-D ends the conversation."""
    if message is not None and not message.strip():
        raise typer.BadParameter("the question is empty", param_hint="MESSAGE")
    options = {} if max_tokens is None else {"max_tokens": max_tokens}
    # A runner, because Ctrl-C ends what it runs and not the conversation around it.
    with asyncio.Runner() as runner:
        api = connection.find()
        runner.run(api.__aenter__())
        try:
            service = runner.run(connection.resolve(api, "/inference", alias, "alias"))
            conversation = _Conversation(api, service["id"], options, as_json=as_json)
            if message is not None:
                runner.run(conversation.ask(message))
                return
            while (question := _question()) is not None:
                if question:
                    _until_stopped(runner, conversation.ask(question))
        finally:
            runner.run(api.__aexit__(None, None, None))


def _until_stopped(runner: asyncio.Runner, answer: Coroutine[Any, Any, None]) -> None:
    """Run an answer until it is whole or Ctrl-C stops it; another signal ends the command."""
    try:
        runner.run(answer)
    except KeyboardInterrupt as stopped:
        if type(stopped) is not KeyboardInterrupt:
            raise
        output.say("\nStopped. Ctrl-D ends the conversation.")


class _Conversation:
    """What was said so far. An answer that was stopped stays in it as far as it had come."""

    def __init__(self, api: Api, service_id: str, options: dict[str, Any], *, as_json: bool) -> None:
        self._api = api
        self._service_id = service_id
        self._options = options
        self._as_json = as_json
        self._messages: list[dict[str, str]] = []

    async def ask(self, question: str) -> None:
        """Print the answer as it comes. Cancelling this closes the request, which frees its slot."""
        asked = [*self._messages, {"role": "user", "content": question}]
        answer = ""
        try:
            async for piece in self._api.chat(self._service_id, asked, **self._options):
                answer += piece
                if self._as_json:
                    output.show_json({"content": piece})
                else:
                    print(piece, end="", flush=True)
            if not self._as_json:
                print()
        finally:
            if answer:
                self._messages = [*asked, {"role": "assistant", "content": answer}]


def _question() -> str | None:
    """The next question, None at the end."""
    if sys.stdin.isatty():
        output.errors.print("> ", end="")
    line = sys.stdin.readline()
    if not line and sys.stdin.isatty():
        output.errors.print()
    return line.strip() if line else None
