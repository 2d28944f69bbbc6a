"""What goes wrong when an API is called; apart, so that a command line can name it without loading a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """The server refused. `error` is the error object, `beside` what stands beside it."""

    def __init__(self, status: int, document: Mapping[str, Any], request_id: str | None) -> None:
        self.status = status
        error = document.get("error")
        self.error: dict[str, Any] = (
            error if isinstance(error, dict) else {"code": "unknown", "message": str(document)}
        )
        self.beside = {name: value for name, value in document.items() if name != "error"}
        self.request_id = request_id
        super().__init__(f"{self.error.get('message')} ({self.error.get('code')})")

    @property
    def code(self) -> str:
        return str(self.error.get("code"))


class Unreachable(Exception):
    """No controller answers there."""
