"""Render docs/clients.md: which clients were tried on a running installation, and what of each works. With --check, say
instead whether that page is of the releases that are locked.

The states are those of the last `make clients ALL=1`, which has to have tried every client in the release that its
lock has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "clients.md"
sys.path.insert(0, str(ROOT / "tests"))

from clients.environments import CLIENTS, Client  # noqa: E402  # from the tests beside us
from clients.running import BASE_URLS, RESULTS  # noqa: E402

STEPS = ("chat", "stream", "embeddings", "error", "abort")
INTRODUCTION = """\
# Clients

Each of these releases was run in an environment of its own against a running installation, over both base URLs:
`/api/v1/inference/{id}/v1` of a service and `/api/v1/openai/v1` of a project, where `model` picks the service.
`make clients ALL=1` does it again, and `scripts/clients_page.py` writes this page from what came of it.

- **chat**, **stream**, **embeddings**: the engine's answer arrives as the client shows it; a stream in pieces.
- **error**: a model that is not served and a token that nobody has are raised as the client's own error, with our
  message.
- **abort**: a stream is left, as the last column has it, while the engine is silent; the request then ends at the
  engine, though the client's process lives on.

`-`: the client has nothing for it.
"""


def stale(clients: Sequence[Client], results: Mapping[str, Any]) -> list[str]:
    """The clients of which not every step was tried in the release that is locked."""
    return [client.name for client in clients if not _tried(client, results.get(client.name, {}))]


def _tried(client: Client, result: Mapping[str, Any]) -> bool:
    passed = result.get("passed", {})
    steps = [(url, step) for url in BASE_URLS for step in STEPS if step not in client.lacks]
    return result.get("version") == client.version and all(step in passed.get(url, {}) for url, step in steps)


def render(clients: Sequence[Client], results: Mapping[str, Any]) -> str:
    """The whole page."""
    head = ["client", "release", *STEPS, "base URLs", "aborted by"]
    lines = [INTRODUCTION, f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for client in clients:
        passed = results[client.name]["passed"]
        steps = [_state(client, step, passed) for step in STEPS]
        urls = ", ".join(url for url in BASE_URLS if any(passed[url].values()))
        lines.append(f"| {' | '.join([_title(client), client.version, *steps, urls, client.aborts])} |")
    return "\n".join(lines) + "\n"


def _title(client: Client) -> str:
    return f"`{client.package}` ({'npm' if client.in_node else 'Python'})"


def _state(client: Client, step: str, passed: Mapping[str, Mapping[str, bool]]) -> str:
    """Whether a step went well with every base URL."""
    if step in client.lacks:
        return "-"
    failed = [url for url in BASE_URLS if not passed[url][step]]
    return f"**no** ({', '.join(failed)})" if failed else "yes"


def _shown(client: Client) -> str:
    """How the page's row of a client begins."""
    return f"| {_title(client)} | {client.version} |"


def main() -> None:
    if "--check" in sys.argv[1:]:
        page = PAGE.read_text() if PAGE.exists() else ""
        if missing := [client.name for client in CLIENTS if _shown(client) not in page]:
            raise SystemExit(
                f"{PAGE.name} lacks {', '.join(missing)}; run `make clients ALL=1` and this script."
            )
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if untried := stale(CLIENTS, results):
        raise SystemExit(f"Run `make clients ALL=1` first: {', '.join(untried)} as locked was not tried.")
    PAGE.write_text(render(CLIENTS, results))


if __name__ == "__main__":
    main()
