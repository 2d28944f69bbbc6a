"""The contract's table of routes, as far as this release has them, with a request that succeeds on each.

Paths and bodies are templates: what stands in braces is made by the test (`Scene` in `test_access.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

START = ("inference:manage", "jobs:execute", "contributors:read", "models:read")
STOP = ("inference:manage", "jobs:cancel")
TOKENS = ("inference:manage", "inference:invoke", "tokens:manage")
INVOKE = ("inference:invoke",)
OCTETS = "application/octet-stream"


@dataclass(frozen=True)
class Row:
    """`service` is the state in which the request finds its service; `held` names statements besides C-H5."""

    method: str
    path: str
    scopes: tuple[str, ...]
    status: int = 200
    body: Any = None
    service: str | None = None
    held: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def is_management(self) -> bool:
        return "/v1/" not in self.path

    @property
    def is_mutation(self) -> bool:
        return self.method != "GET"


PIECE = {"offset": 0, "data": "YQ=="}
CONTROL = {"revision": "{revision}"}
REPLACE = {"revision": "{revision}", "spec": "{spec}"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}

TABLE = (
    Row("GET", "/models", ("models:read",)),
    Row("GET", "/models/{model}", ("models:read",)),
    Row("POST", "/models", ("models:manage",), 201, "{manifest}"),
    Row("POST", "/models/{model}/files/0", ("models:manage",), 200, PIECE),
    Row("POST", "/models/{model}/files/0/bytes?offset=0", ("models:manage",), 200, b"a"),
    Row("DELETE", "/models/{model}", ("models:manage",)),
    Row("DELETE", "/models/{model}?evict=true", ("models:manage",)),
    Row("GET", "/inference", ("inference:read",)),
    Row("GET", "/inference/{service}", ("inference:read",), service="stopped"),
    Row("POST", "/inference/preview", ("inference:manage",), 200, "{spec}"),
    Row("POST", "/inference", START, 202, "{spec}"),
    Row("PUT", "/inference/{service}", START, 202, REPLACE, "stopped", ("C-S14",)),
    Row("POST", "/inference/{service}/control/drain", STOP, 202, CONTROL, "ready"),
    Row("POST", "/inference/{service}/control/start", START, 202, CONTROL, "stopped", ("C-S14",)),
    Row("POST", "/inference/{service}/tokens", TOKENS, 201, {"lifetime": 60}, "ready"),
    Row("GET", "/inference/{service}/v1/models", INVOKE, service="ready"),
    Row("POST", "/inference/{service}/v1/chat/completions", INVOKE, 200, CHAT, "ready"),
    Row("POST", "/inference/{service}/v1/embeddings", INVOKE, 200, {"input": "Hi"}, "ready"),
    Row("POST", "/inference/{service}/control/stop", STOP, 202, CONTROL, "ready", ("C-S15",)),
    Row("POST", "/inference/{service}/control/remove", STOP, 202, CONTROL, "stopped", ("C-S15",)),
)
