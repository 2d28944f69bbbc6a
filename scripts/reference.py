"""Write the reference pages that follow from the code: settings, error codes, the command line.

usage: reference.py [DIRECTORY]     docs/reference by default
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer.main

from ficc.cli.main import app
from ficc.domain.reasons import REASONS
from ficc.protocol.http_api import CODES
from ficc.settings import Section, Settings

ROOT = Path(__file__).resolve().parents[1]


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "In `ficc.toml` in the state directory under their section, or as `FICC_SECTION_NAME` in the environment, which"
        " wins. `ficc doctor` prints what is in force.",
        "",
        "`state_directory` (`FICC_STATE_DIRECTORY`, `--state-directory`): "
        + str(Settings.model_fields["state_directory"].description),
    ]
    for section_name, section in Settings.model_fields.items():
        kind = section.annotation
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            continue
        lines += [
            "",
            f"## {section_name}",
            "",
            "| setting | default | bounds | meaning |",
            "|---|---|---|---|",
        ]
        for name, field in kind.model_fields.items():
            meaning = " ".join((field.description or "").split())
            lines.append(f"| `{name}` | `{_default(field.default)}` | {_bounds(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    return "–" if value is None or value == () else str(value)


def _bounds(field: Any) -> str:
    parts = []
    for rule in field.metadata:
        for sign, name in (("≥", "ge"), (">", "gt"), ("≤", "le")):
            if (limit := getattr(rule, name, None)) is not None:
                parts.append(f"{sign} {limit}")
    return ", ".join(parts)


def errors_page() -> str:
    lines = [
        "# Error codes",
        "",
        'Every error is `{"error": {"code", "message", "type", "param"}}`; the message says what to do.'
        " Where an engine may have seen the request, the answer carries `x-should-retry: false`.",
        "",
        "| code | status | type | meaning |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `{code}` | {facts.status} | `{facts.type}` | {facts.summary} |"
        for code, facts in sorted(CODES.items())
    ]
    lines += [
        "",
        "## Reasons",
        "",
        "Why something is as it is: the `reason` of a replica, the `error` of a file, the `problems` and `warnings`"
        " of a preview. A reason's code is one of these or one of the above.",
        "",
        "| code | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{code}` | {summary} |" for code, summary in sorted(REASONS.items())]
    return "\n".join(lines) + "\n"


VARIABLES = {
    "FICC_STATE_DIRECTORY": "Where everything is kept, and so which controller a command talks to: the one that runs"
    " there, with its owner's token. As `--state-directory`.",
    "FICC_URL": "Another controller: `http(s)://HOST:PORT` or `unix:/path`.",
    "FICC_TOKEN_FILE": "The file with the token to use. A token never comes by a flag, which others could see.",
    "FICC_TOKEN": "The token itself, where a file will not do.",
    "FICC_DEBUG": "Any value: as `--debug`.",
    "FICC_SECTION_NAME": "Any [setting](settings.md), for the processes that a command starts.",
    "NO_COLOR": "Any value: no colours.",
}


def command_page() -> str:
    lines = [
        "# Command line",
        "",
        "Exit status: 0 done, 1 the operation failed, 2 wrong usage, 128 + N ended by signal N (130: Ctrl-C).",
        "",
        "`--state-directory`, `--quiet` and `--debug` may also stand behind a command. Without `--debug` no failure"
        " shows a traceback.",
        "",
        "| variable | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]

    def describe(command: Any, words: str, parent: Any) -> None:
        name = words.rsplit(" ", 1)[-1]
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        context.terminal_width = context.max_content_width = 100
        if not getattr(command, "commands", None):
            lines.extend(["", f"## {words}", "", "```", command.get_help(context), "```"])
        for inner_name, inner in sorted(getattr(command, "commands", {}).items()):
            describe(inner, f"{words} {inner_name}", context)

    describe(typer.main.get_command(app), "ficc", None)
    return "\n".join(lines) + "\n"


PAGES = {"settings.md": settings_page, "errors.md": errors_page, "command-line.md": command_page}


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference"
    directory.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main()
