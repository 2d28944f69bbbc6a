"""What a command itself finds to be wrong, beside what the API refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FAILED = 1
WRONG_USAGE = 2


class Failure(Exception):
    """Ends the command with one line for people, a code for programs, and the exit status. `hints` are further lines
    for people, `more` further members of the error for programs."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: int = FAILED,
        hints: Sequence[str] = (),
        more: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> None:
        self.code = code
        self.message = message
        self.status = status
        self.hints = hints
        self.more = more or {}
        self.request_id = request_id
        super().__init__(message)


def usage(message: str) -> Failure:
    """Something that was given (a flag, a variable, a setting) cannot be meant."""
    return Failure("usage", message, status=WRONG_USAGE)


def of(error: Exception) -> Failure | None:
    """What an exception of a setting, of a file or of the system means to the person who typed the command;
    None for a fault of ours."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, ValueError):
        if hasattr(error, "errors"):
            return Failure("invalid_settings", _of_settings(error), status=WRONG_USAGE)
        return usage(f"{error}.")
    if isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        return Failure("system", what if error.filename is None else f"{error.filename}: {what}.")
    return None


_PLAIN = {
    "extra_forbidden": "there is no such setting; docs/reference/settings.md has them all",
    "missing": "is missing",
}


def _of_settings(error: Any) -> str:
    """The first thing that pydantic finds wrong with the settings, by its place in `ficc.toml`."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = _PLAIN.get(first["type"]) or str(first["msg"]).removeprefix("Value error, ")
    variable = "FICC_" + "_".join(map(str, first["loc"])).upper()
    return f"{place} ({variable}): {message[0].lower()}{message[1:]}."
