"""Options that many commands have."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the API's record as JSON.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]


def group(help_text: str) -> typer.Typer:
    return typer.Typer(help=help_text, no_args_is_help=True, rich_markup_mode=None)


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; anywhere else a destructive command needs --yes (exit 2)."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("this needs a terminal to ask on, or --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)
