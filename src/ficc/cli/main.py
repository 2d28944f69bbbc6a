"""The entry point `ficc`. Exit status: 0 done, 1 the operation failed, 2 wrong usage, 128 + N ended by signal N (130:
Ctrl-C)."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ficc import __version__
from ficc.cli import failure, output
from ficc.cli.commands import chat, content, models, nodes, processes, runtimes, services, tokens, usage
from ficc.cli.failure import FAILED, WRONG_USAGE
from ficc.client.errors import ApiError, Unreachable
from ficc.domain.errors import Refused

app = typer.Typer(
    help="Private inference on machines people already have.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(models.app, name="model")
app.add_typer(content.app, name="content")
app.add_typer(runtimes.app, name="runtime")
app.add_typer(services.app, name="service")
app.add_typer(nodes.app, name="node")
app.add_typer(tokens.app, name="token")
services.app.command("usage")(usage.of_service)
app.command("usage")(usage.of_project)
app.command("chat")(chat.chat)
for command in (processes.up, processes.serve, processes.executor, processes.open_console, processes.doctor):
    name = "open" if command is processes.open_console else command.__name__
    app.command(name)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    state_directory: Annotated[
        Path | None,
        typer.Option(help="Where everything is kept (FICC_STATE_DIRECTORY).", file_okay=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no hints.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure (FICC_DEBUG).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if state_directory is not None:  # by the environment, so that processes that we start have it too
        os.environ["FICC_STATE_DIRECTORY"] = str(state_directory.absolute())
    if debug:
        os.environ["FICC_DEBUG"] = "1"
    if quiet:
        output.be_quiet()


GLOBAL_FLAGS = frozenset({"--quiet", "--debug"})
GLOBAL_OPTION = "--state-directory"


def global_first(words: Sequence[str]) -> list[str]:
    """The same command line with the options of `ficc` itself at its head, wherever they were written."""
    ours: list[str] = []
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*ours, *rest, word, *left]
        if word == GLOBAL_OPTION and left:
            ours += [word, left.pop(0)]
        elif word in GLOBAL_FLAGS or word.startswith(GLOBAL_OPTION + "="):
            ours.append(word)
        else:
            rest.append(word)
    return [*ours, *rest]


class _Ended(KeyboardInterrupt):
    """A signal other than Ctrl-C's asked us to end; what a command began is cleared up all the same."""


def run() -> None:
    """Run the command line and exit."""
    came: list[int] = []

    def end(number: int, _: object) -> None:
        came.append(number)
        raise _Ended

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)
    status = _status(global_first(sys.argv[1:]))
    sys.exit(128 + came[0] if came else status)


def _status(words: list[str]) -> int:
    as_json = "--json" in words
    try:
        return app(words, standalone_mode=False) or 0  # the status of typer.Exit, None when all went well
    except typer.TyperException as error:
        message = getattr(error, "format_message", error.__str__)().replace("Value error, ", "")
        if message.startswith("Usage:"):  # a group without a command
            output.errors.print(message, markup=False)
        else:
            output.show_error(message, "usage", as_json=as_json)
        return WRONG_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except Exception as error:
        return _failed(error, as_json=as_json)


def _failed(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong in one line, and the traceback only to those who asked for it."""
    if os.environ.get("FICC_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, ApiError):
        message = str(error.error.get("message"))
        output.show_error(message, error.code, as_json=as_json, request_id=error.request_id)
    elif isinstance(error, Refused):
        output.show_error(error.message, error.code, as_json=as_json)
    elif isinstance(error, Unreachable):
        output.show_error(str(error), "unreachable", as_json=as_json)
    elif type(error) is LookupError:  # not its subclasses: a KeyError is a fault of ours
        output.show_error(str(error.args[0]), "not_found", as_json=as_json)
    elif (found := failure.of(error)) is not None:
        output.show_error(
            found.message,
            found.code,
            as_json=as_json,
            request_id=found.request_id,
            hints=found.hints,
            **found.more,
        )
        return found.status
    else:
        what = f"{type(error).__name__}: {error}"
        output.show_error(f"A fault of ours: {what}. --debug shows where.", "internal", as_json=as_json)
    return FAILED


if __name__ == "__main__":
    run()
