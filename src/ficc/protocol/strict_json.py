"""JSON as RFC 8259 has it and as every reader understands it: no duplicate members, no NaN, no lone
surrogates, no number that some reader would change, bounded depth and number of values.

The bounds are checked on the text first, at the speed of the regular expression engine and in time that is
linear in the text whatever it holds, so that a hostile body costs little to refuse. Where the fault stands is
looked up only once there is one. `members` also tells where each top-level member's value stands, so that
one can be replaced without touching the rest.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import c_make_scanner  # type: ignore[attr-defined]
from math import isinf
from typing import Any, NamedTuple

DEPTH_MAX = 64
VALUES_MAX = 262_144
INTEGER_DIGITS_MAX = 20
"""Digits of an integer: every 64-bit value fits, with or without a sign; nothing that needs big integers."""
_SHOWN_CHARACTERS = 64
"""How much of a client's own text a refusal repeats."""

# Possessive throughout, and an unfinished string goes to the end: nothing is ever matched twice.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_STRINGS = re.compile(_STRING, re.DOTALL)
_BRACKETS = re.compile(rb"(?:[^\"\[\]{}]++|" + _STRING + rb")*+([\[\]{}])", re.DOTALL)
_VALUES = re.compile(rb"(?:[^\",\[{]++|" + _STRING + rb")*+[,\[{]", re.DOTALL)
_LONG_RUN = b"0" * (INTEGER_DIGITS_MAX + 1)
_TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_INTEGER = rb"(?<![0-9.eE+-])-?[0-9]{%d,}+(?![.eE])" % len(_LONG_RUN)
_LONG_INTEGERS = re.compile(_LONG_INTEGER)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"[ \t\n\r]*")
_SPACES = frozenset(" \t\n\r")
_PLAIN_NAME = re.compile(r'"([^"\\\x00-\x1f]*+)"[ \t\n\r]*+:[ \t\n\r]*+')
"""A member's name without escapes, and all up to its value."""


class NotJson(Exception):
    """Why a text is refused; `place` names the member or position."""

    def __init__(self, message: str, place: str | None = None) -> None:
        super().__init__(message if place is None else f"{message} ({place})")
        self.place = place


def parse(data: bytes, *, depth_max: int = DEPTH_MAX, values_max: int = VALUES_MAX) -> Any:
    """The value. Raises NotJson."""
    text = _checked(data, depth_max, values_max)
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _nested_too_deep(data, depth_max) from None
    except ValueError as error:
        raise _not_json(error, text) from None
    _refuse_lone_surrogates(data, value)
    return value


class Member(NamedTuple):
    """A top-level member: its value, and where the value stands in the text."""

    value: Any
    start: int
    end: int


class Place(NamedTuple):
    """A place for a value in a text, in bytes, and what stands around the value there."""

    start: int
    end: int
    before: str = ""
    after: str = ""

    def filled(self, data: bytes, value: Any) -> bytes:
        """The text with this value there; all else as it was."""
        new = f"{self.before}{json.dumps(value, ensure_ascii=False)}{self.after}"
        return b"".join((data[: self.start], new.encode(), data[self.end :]))


@dataclass(frozen=True, slots=True)
class Object:
    """A top-level object: its text and members."""

    text: str
    members: dict[str, Member]

    def get(self, name: str) -> Any:
        member = self.members.get(name)
        return None if member is None else member.value

    def place(self, name: str) -> Place:
        """Where a member's value stands, or where the member can be put: first."""
        member = self.members.get(name)
        if member is not None:
            return Place(self._bytes(member.start), self._bytes(member.end))
        at = self._bytes(self.text.index("{") + 1)
        return Place(at, at, f"{json.dumps(name)}: ", ", " if self.members else "")

    def _bytes(self, characters: int) -> int:
        return characters if self.text.isascii() else len(self.text[:characters].encode())


def members(data: bytes, *, depth_max: int = DEPTH_MAX, values_max: int = VALUES_MAX) -> Object:
    """The members of a text that is one object. Raises NotJson."""
    text = _checked(data, depth_max, values_max)
    try:
        found = _scan_object(text)
    except StopIteration as stop:
        raise NotJson("a value is missing", f"character {stop.value}") from None
    except RecursionError:
        raise _nested_too_deep(data, depth_max) from None
    except (ValueError, IndexError) as error:
        raise _not_json(error, text) from None
    if _ESCAPED_SURROGATE.search(data):
        _refuse_lone_surrogates(data, {name: member.value for name, member in found.items()})
    return Object(text, found)


def _scan_object(text: str) -> dict[str, Member]:
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise NotJson("the body is not a JSON object")
    found: dict[str, Member] = {}
    at = _skip(text, at + 1)
    if text[at] != "}":
        while True:
            plain = _PLAIN_NAME.match(text, at)
            if plain is not None:
                name, start = plain[1], plain.end()
            else:
                name, start = _scan_name(text, at)
            value, end = _scan(text, start)
            if name in found:
                raise _duplicate(name)
            found[name] = Member(value, start, end)
            at = _skip(text, end)
            if text[at] == "}":
                break
            if text[at] != ",":
                raise NotJson("a comma is missing", f"character {at}")
            at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise NotJson("something stands after the value", f"character {at + 1}")
    return found


def _scan_name(text: str, at: int) -> tuple[str, int]:
    """A member's name, and where its value begins."""
    if text[at] != '"':
        raise NotJson("a member's name is missing", f"character {at}")
    name, at = scanstring(text, at + 1, True)
    at = _skip(text, at)
    if text[at] != ":":
        raise NotJson("a colon is missing", f"character {at}")
    return name, _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] not in _SPACES:
        return at
    match = _SPACE.match(text, at)
    return match.end() if match else at


# Bounds, on the text.


def _checked(data: bytes, depth_max: int, values_max: int) -> str:
    """The text, once its bounds are known to hold."""
    if not _is_plain(data, depth_max, values_max):
        _check_bounds(data, depth_max, values_max)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotJson("the text is not UTF-8", f"byte {error.start}") from None


def _is_plain(data: bytes, depth_max: int, values_max: int) -> bool:
    """Whether nothing can break a bound, even if all that stands inside strings counted: most bodies are like that."""
    return (
        len(data) < values_max  # each value and each name takes a byte, and so does what stands between two
        and data.count(b"[") + data.count(b"{") <= depth_max
        and _LONG_RUN not in data.translate(_TO_ZEROS)
        and b"NaN" not in data
        and b"Infinity" not in data
    )


def _check_bounds(data: bytes, depth_max: int, values_max: int) -> None:
    # A value has at most one string and a name. Quotes that are escaped are not counted, or not all.
    if data.count(b'"') - data.count(b'\\"') > 4 * values_max:
        raise NotJson(f"more than {values_max} values", _too_many_at(data, values_max))
    bare = _STRINGS.sub(b"", data)
    values = 1 + bare.count(b",") + bare.count(b"[") + bare.count(b"{")
    if values > values_max:
        raise NotJson(f"more than {values_max} values", _too_many_at(data, values_max))
    if _deeper_than(bare, depth_max):
        raise _nested_too_deep(data, depth_max)
    if _LONG_RUN in bare.translate(_TO_ZEROS) and _LONG_INTEGERS.search(bare):
        raise NotJson(f"an integer has more than {INTEGER_DIGITS_MAX} digits", _first(_LONG_INTEGER, data))
    if b"NaN" in bare or b"Infinity" in bare:
        raise NotJson("NaN and Infinity are no JSON values", _first(rb"NaN|Infinity", data))


_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _deeper_than(bare: bytes, depth_max: int) -> bool:
    """Whether brackets nest deeper: each round removes the innermost level. Brackets that do not pair are
    the parser's to refuse."""
    brackets = bare.translate(_TO_SQUARE, _NO_BRACKETS)
    if brackets.count(b"[") != brackets.count(b"]"):
        return False
    for _ in range(depth_max):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            return False
        brackets = inner
    return bool(brackets)


def _nested_too_deep(data: bytes, depth_max: int) -> NotJson:
    depth = 0
    for bracket in _BRACKETS.finditer(data):
        depth += 1 if bracket[1] in b"[{" else -1
        if depth > depth_max:
            return NotJson(f"nested deeper than {depth_max}", f"byte {bracket.start(1)}")
    return NotJson(f"nested deeper than {depth_max}")


def _too_many_at(data: bytes, values_max: int) -> str:
    """Where the first value too many begins, or where the text ends."""
    begins = islice(_VALUES.finditer(data), values_max - 1, None)
    return f"byte {next((match.end() for match in begins), len(data))}"


def _first(fault: bytes, data: bytes) -> str:
    """Where the first such thing stands outside strings."""
    before = re.match(rb"(?:" + _STRING + rb"|(?!" + fault + rb')[^"])*+', data, re.DOTALL)
    return f"byte {before.end() if before else 0}"


# Faults that only the parser sees.


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _duplicate(name)
            seen.add(name)
    return result


def _duplicate(name: str) -> NotJson:
    return NotJson("a member stands twice", _shown(name))


def _float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise NotJson("a number is too large", _shown(text))
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_float=_float)
_scan = c_make_scanner(_DECODER)


def _refuse_lone_surrogates(data: bytes, value: Any) -> None:
    """Two escapes make one character; half a pair is none, and most readers break on it."""
    if not _ESCAPED_SURROGATE.search(data):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise NotJson("a string holds half a surrogate pair", _surrogate_at(value)) from None


def _surrogate_at(value: Any) -> str | None:
    """The way to a string with half a pair, such as messages[0].content."""
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        way, here = todo.pop()
        if isinstance(here, str) and _SURROGATE.search(here):
            return _shown(way) or None
        if isinstance(here, dict):
            for name, member in here.items():
                below = f"{way}.{name}" if way else name
                if _SURROGATE.search(name):
                    return _shown(below)
                todo.append((below, member))
        elif isinstance(here, list):
            todo += [(f"{way}[{index}]", member) for index, member in enumerate(here)]
    return None


def _shown(text: str) -> str:
    """A client's own text as a refusal repeats it: short, and writable as UTF-8."""
    return text[:_SHOWN_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def _not_json(error: Exception, text: str) -> NotJson:
    if isinstance(error, json.JSONDecodeError):
        return NotJson(error.msg.lower(), f"character {error.pos}")
    if isinstance(error, IndexError):
        return NotJson("the text ends too early", f"character {len(text)}")
    return NotJson(str(error))
