"""Which tests are named for which rows of a list of cases."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROW = re.compile(r"\b[A-Z]\d+\b")


def named_for(rows: Collection[str], modules: Iterable[Path]) -> dict[str, list[str]]:
    """By row: the tests in these modules whose name or description has it."""
    found: dict[str, list[str]] = {row: [] for row in rows}
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if not is_function or not node.name.startswith("test"):
                continue
            named = {part.upper() for part in node.name.split("_")}
            named.update(ROW.findall(ast.get_docstring(node) or ""))
            for row in named & found.keys():
                found[row].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found
