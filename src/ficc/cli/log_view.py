"""How a replica's log is shown, once and as it goes on."""

from __future__ import annotations

from typing import Any

from ficc.cli import output

OVERLAP_CHARACTERS = 4096
"""By so many of its last characters what was shown before is found again."""


def show(log: dict[str, Any]) -> None:
    kept = ", ".join(f"{one['attempt']} (generation {one['generation']})" for one in log["attempts"][1:])
    output.say(
        f"Attempt {log['attempt']} of generation {log['generation']}"
        + (f"; before the newest, --attempt has {kept}." if kept else ".")
    )
    if log["truncated"]:
        output.say("Older output was left out.")
    print(log["text"], end="", flush=True)


def show_more(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Print what was said since; another attempt's log from its beginning."""
    if after["attempt_id"] != before["attempt_id"]:
        show(after)
    else:
        print(added(before["text"], after["text"]), end="", flush=True)
    return after


def added(before: str, after: str) -> str:
    """What a log's newest part has that its newest part of before had not: what follows its last words, or all of it
    when those are left out by now."""
    if after.startswith(before):
        return after[len(before) :]
    last_words = before[-OVERLAP_CHARACTERS:]
    at = after.rfind(last_words)
    return after if at < 0 else after[at + len(last_words) :]
