"""Render the OpenAPI document into docs/openapi.json, or, with --check, say whether that is up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ficc.controller.api.app import openapi_document

TARGET = Path(__file__).parents[1] / "docs" / "openapi.json"


def rendered() -> str:
    return json.dumps(openapi_document(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> None:
    text = rendered()
    if "--check" not in sys.argv[1:]:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(text)
    elif not TARGET.exists() or TARGET.read_text() != text:
        raise SystemExit(f"{TARGET} is out of date; run {sys.argv[0]} and commit what it writes.")


if __name__ == "__main__":
    main()
