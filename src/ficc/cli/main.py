"""The entry point `ficc`. Exit status: 0 done, 1 the operation failed, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ficc import __version__
from ficc.cli import output
from ficc.cli.commands import chat, models, nodes, processes, runtimes, services, tokens
from ficc.client.errors import ApiError, Unreachable
from ficc.domain.errors import Refused

app = typer.Typer(
    help="Private inference on machines people already have.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(models.app, name="model")
app.add_typer(runtimes.app, name="runtime")
app.add_typer(services.app, name="service")
app.add_typer(nodes.app, name="node")
app.add_typer(tokens.app, name="token")
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
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no hints.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if quiet:
        output.be_quiet()


def run() -> None:
    """Run the command line and exit."""
    as_json = "--json" in sys.argv
    try:
        sys.exit(app(standalone_mode=False) or 0)  # the status of typer.Exit, None when all went well
    except typer.TyperException as error:
        message = getattr(error, "format_message", error.__str__)()
        if message.startswith("Usage:"):  # a group without a command
            output.errors.print(message, markup=False)
        else:
            output.show_error(message, "usage", as_json=as_json)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except ApiError as error:
        _api_error(error, as_json=as_json)
        sys.exit(1)
    except Refused as refused:
        output.show_error(refused.message, refused.code, as_json=as_json)
        sys.exit(1)
    except Unreachable as error:
        output.show_error(str(error), "unreachable", as_json=as_json)
        sys.exit(1)
    except LookupError as error:
        output.show_error(str(error.args[0]), "not_found", as_json=as_json)
        sys.exit(1)
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        first = error.errors()[0]  # pydantic's, of a setting
        place = ".".join(map(str, first["loc"]))
        output.show_error(f"{place}: {first['msg']}", "invalid_settings", as_json=as_json)
        sys.exit(1)


def _api_error(error: ApiError, *, as_json: bool) -> None:
    output.show_error(
        str(error.error.get("message")), error.code, as_json=as_json, request_id=error.request_id
    )


if __name__ == "__main__":
    run()
