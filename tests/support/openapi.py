"""The OpenAPI document as tests read it: every operation, and the smallest document that its schema takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import Phase, find, settings
from hypothesis import strategies as st

from ficc.controller.api.app import openapi_document

Json = dict[str, Any]
DOCUMENT: Json = openapi_document()


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    document: Json

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def needs_caller(self) -> bool:
        return bool(self.document.get("security"))

    @property
    def names_scopes(self) -> bool:
        return bool(re.search(r"\bScopes?\b|\b[a-z]+:[a-z]+\b", self.document["description"]))

    @property
    def body(self) -> Json | None:
        """The schema of its JSON body."""
        content = self.document.get("requestBody", {}).get("content", {})
        schema: Json | None = content.get("application/json", {}).get("schema")
        return None if schema is None else resolved(schema)

    @property
    def query(self) -> set[str]:
        return {p["name"] for p in self.document.get("parameters", ()) if p["in"] == "query"}

    @property
    def in_path(self) -> list[str]:
        return [p["name"] for p in self.document.get("parameters", ()) if p["in"] == "path"]

    def target(self, values: Mapping[str, str]) -> str:
        """The path below /api/v1 with these values."""
        return self.path.removeprefix("/api/v1").format(**values)

    def takes(self, target: str) -> bool:
        """Whether a path below /api/v1 is this one's."""
        pattern = re.sub(r"\{[^}]+\}", "[^/]+", self.path.removeprefix("/api/v1"))
        return re.fullmatch(pattern, target) is not None

    def needed_query(self) -> dict[str, str]:
        return {
            p["name"]: str(example(p["schema"]))
            for p in self.document.get("parameters", ())
            if p["in"] == "query" and p.get("required")
        }


def operations() -> list[Operation]:
    return [
        Operation(method.upper(), path, operation)
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]


def resolved(schema: Json) -> Json:
    """A schema with every reference replaced by what it refers to."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return resolved(DOCUMENT["components"]["schemas"][name])
    found = dict(schema)
    for word in ("items", "additionalProperties"):
        if isinstance(found.get(word), dict):
            found[word] = resolved(found[word])
    for word in ("anyOf", "allOf", "oneOf"):
        if word in found:
            found[word] = [resolved(one) for one in found[word]]
    if "properties" in found:
        found["properties"] = {name: resolved(one) for name, one in found["properties"].items()}
    return found


def example(schema: Json, *, full: bool = False) -> Any:
    """A value that a resolved schema takes: with required members only, or with all."""
    schema = resolved(schema)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return example(schema["anyOf"][0], full=full)
    match schema.get("type"):
        case "object":
            wanted = schema.get("properties", {}) if full else schema.get("required", ())
            return {name: example(schema["properties"][name], full=full) for name in wanted}
        case "array":
            return [example(schema["items"], full=full)] * max(1, schema.get("minItems", 0))
        case "string":
            return _text(schema.get("pattern"), schema.get("minLength", 0))
        case "integer":
            return int(schema.get("minimum", 0))
        case "boolean":
            return False
    raise AssertionError(f"there is no example for {schema}")


@cache
def _text(pattern: str | None, least: int) -> str:
    if pattern is None:
        return "x" * max(least, 1)
    quick = settings(phases=(Phase.generate,), derandomize=True, database=None)  # any one will do
    return find(st.from_regex(pattern.rstrip("$") + r"\Z"), lambda text: len(text) >= least, settings=quick)


def places(document: Any, at: str = "") -> Iterator[tuple[str, Json]]:
    """Every object inside a document with its place, written as errors name it: files[0].sha256."""
    if isinstance(document, dict):
        yield at, document
        for name, value in document.items():
            yield from places(value, f"{at}.{name}" if at else name)
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from places(value, f"{at}[{index}]")
