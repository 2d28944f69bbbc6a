"""GGUF: the header of a model file, read in pieces and within bounds.

    magic "GGUF" | version u32 | tensors u64 | keys u64 | keys and values | tensor infos | padding | data

`Reader` is fed whatever arrives, in pieces of any size, and says in `need` how much more is certainly to
come. It keeps little: what is longer than a limit (the words of a tokenizer, a chat template) is walked and
counted, not held. Nothing in the file decides how much memory or work the reader spends: a number is held
against what is left of the header's limit, and of the file, before anything is done with it.

Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little endian. Where llama.cpp is
stricter than the specification (each tensor follows the one before), so is this reader.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from ficc.domain.errors import Refused
from ficc.domain.model_shape import LAYERS_MAX
from ficc.protocol.gguf_header import Header, Items, Metadata, Scalar, Tally, malformed, shape_of
from ficc.protocol.gguf_types import (
    ARRAY,
    BOOL,
    ITEM_BYTES_MIN,
    STRING,
    STRUCTS,
    TENSOR_TYPES,
    UINT32,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20
DIMENSIONS_MAX = 4
ITEMS_MAX = (1 << 63) - 1
"""Numbers in one tensor: the engine counts them with a sign."""
KEY_ENTRY_BYTES_MIN = 8 + 1 + 4 + 1
TENSOR_ENTRY_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8

_U32, _U64, _COUNTS = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a header may cost. The largest that is known (a vocabulary of 262,144 words with their merge
    rules and a few thousand tensors) takes some 20 MB."""

    header_bytes_max: int = 64 << 20
    keys_max: int = 8192
    key_bytes_max: int = 1024
    tensors_max: int = 1 << 17
    tensor_name_bytes_max: int = 128
    string_bytes_max: int = 16 << 20
    """Of a value that is passed over."""
    string_bytes_kept: int = 4096
    array_items_kept: int = LAYERS_MAX
    kept_bytes_max: int = 1 << 20
    """All keys and kept values together."""
    array_depth_max: int = 3
    array_strings_max: int = 1 << 21
    """In all arrays together: strings are walked one by one."""
    inner_arrays_max: int = 4096
    """Also walked one by one, and slower. No model is known that has any."""


_Steps = Generator[int, None, Any]
"""A piece of parsing: yields while so many bytes are not in the buffer yet."""


@dataclass(slots=True)
class Reader:
    """Reads one header.

    `feed` raises Refused `model_header_refused` naming the key or tensor and the byte where the file went
    wrong; after that, and after `done`, it takes nothing more. `file_bytes`, when it is known, is the size of
    the whole file.
    """

    limits: Limits = field(default_factory=Limits)
    file_bytes: int | None = None
    bytes_read: int = 0
    """What was fed until the header was complete, so at most one piece more than the header."""
    header: Header | None = None
    _buffer: bytearray = field(default_factory=bytearray)
    _at: int = 0  # in the buffer
    _offset: int = 0  # of the buffer in the file
    _passing: int = 0  # bytes that are dropped as they come
    _wanted: int = 0
    _promised: int = 0  # bytes of entries that were announced and not begun
    _place: str = "the beginning"
    _kept: int = 0
    _walked: Counter[int] = field(default_factory=Counter)
    _steps: _Steps | None = None

    def __post_init__(self) -> None:
        self._steps, self._wanted = self._header(), len(MAGIC)

    @property
    def done(self) -> bool:
        return self.header is not None

    @property
    def need(self) -> int:
        """The least number of bytes that the header still has; 0 when it is complete."""
        if self._steps is None:
            return 0
        return max(1, self._wanted + self._passing + self._promised - (len(self._buffer) - self._at))

    def feed(self, data: bytes | memoryview) -> None:
        """Takes the next bytes of the file."""
        if self._steps is None:
            return
        self.bytes_read += len(data)
        passed = min(self._passing, len(data))
        self._passing -= passed
        self._offset += passed
        self._buffer += data[passed:]
        if self._passing or len(self._buffer) - self._at < self._wanted:
            return
        try:
            self._wanted = next(self._steps)
        except StopIteration as end:
            self.header, self._steps = end.value, None
        except BaseException:
            self._steps = None
            raise
        del self._buffer[: self._at]
        self._offset += self._at
        self._at = 0

    def end(self) -> Header:
        """The header, once the file has no more bytes. Raises Refused when it is incomplete."""
        if self.header is None:
            self._steps = None
            raise self._refused("the file ends inside its header")
        return self.header

    # What a refusal says, and what every number is held against.

    @property
    def _position(self) -> int:
        return self._offset + self._at

    def _refused(self, why: str) -> Refused:
        return malformed(self._position, self._place, why)

    def _room(self) -> int:
        """Bytes that the header may still take."""
        limit = self.limits.header_bytes_max
        return (limit if self.file_bytes is None else min(limit, self.file_bytes)) - self._position

    def _reserve(self, count: int, what: str) -> None:
        """Refuses what the rest of the header cannot hold. A count is checked before it is believed."""
        if self.file_bytes is not None and self._position + count > self.file_bytes:
            raise self._refused(
                f"{what} would reach past the end of the file, which has {self.file_bytes} bytes"
            )
        if self._position + count > self.limits.header_bytes_max:
            raise self._refused(
                f"{what} would make the header longer than {self.limits.header_bytes_max} bytes"
            )

    def _keep(self, count: int) -> None:
        self._kept += count
        if self._kept > self.limits.kept_bytes_max:
            raise self._refused(f"the metadata holds more than {self.limits.kept_bytes_max} bytes of values")

    def _walk(self, kind: int, count: int) -> None:
        """Refuses more of what is walked one by one than the whole header may have."""
        limits = self.limits
        most, what = {
            STRING: (limits.array_strings_max, "strings"),
            ARRAY: (limits.inner_arrays_max, "arrays"),
        }[kind]
        self._walked[kind] += count
        if self._walked[kind] > most:
            raise self._refused(f"arrays so far hold {self._walked[kind]} {what}, and {most} are allowed")

    # Pieces of the format. Each is a generator that yields while bytes are missing.

    def _need(self, count: int) -> _Steps:
        self._reserve(count, "what is announced here")
        while len(self._buffer) - self._at < count:
            yield count

    def _pass_over(self, count: int) -> _Steps:
        there = min(count, len(self._buffer) - self._at)
        self._at += there
        self._passing = count - there
        while self._passing:
            yield 0

    def _number(self, form: struct.Struct) -> _Steps:
        if len(self._buffer) - self._at < form.size:
            yield from self._need(form.size)
        (value,) = form.unpack_from(self._buffer, self._at)
        self._at += form.size
        return value

    def _bytes(self, bytes_max: int, what: str) -> _Steps:
        """A short string that is kept, as bytes."""
        length = yield from self._number(_U64)
        if not 1 <= length <= bytes_max:
            raise self._refused(f"{what} has {length} bytes, and 1 to {bytes_max} are allowed")
        yield from self._need(length)
        value = bytes(self._buffer[self._at : self._at + length])
        self._at += length
        return value

    def _name(self, bytes_max: int, what: str) -> _Steps:
        raw = yield from self._bytes(bytes_max, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._refused(f"{what} is not UTF-8") from None

    # The header, from the top.

    def _header(self) -> _Steps:
        version, tensors, keys = yield from self._preamble()
        metadata = yield from self._metadata(keys, tensors)
        self._place = "before the tensors"
        alignment = self._alignment(metadata)
        tally = yield from self._tensors(tensors, alignment)
        return Header(
            version=version,
            metadata=metadata,
            tensors=tally,
            header_bytes=self._position,
            shape=shape_of(metadata),
        )

    def _preamble(self) -> _Steps:
        yield from self._need(len(MAGIC))
        if self._buffer[: len(MAGIC)] != MAGIC:
            raise self._refused("it does not begin with GGUF, so it is no GGUF file")
        self._at = len(MAGIC)
        version = yield from self._number(_U32)
        if version & 0xFFFF == 0:
            raise self._refused("it is big endian, and only little endian is read")
        if version not in VERSIONS:
            raise self._refused(f"it has version {version}, and only 2 and 3 are read")
        yield from self._need(_COUNTS.size)
        tensors, keys = _COUNTS.unpack_from(self._buffer, self._at)
        self._at += _COUNTS.size
        for count, most, what in (
            (keys, self.limits.keys_max, "keys"),
            (tensors, self.limits.tensors_max, "tensors"),
        ):
            if count > most:
                raise self._refused(f"it announces {count} {what}, and at most {most} are allowed")
        self._reserve(
            keys * KEY_ENTRY_BYTES_MIN + tensors * TENSOR_ENTRY_BYTES_MIN,
            f"{keys} keys and {tensors} tensors",
        )
        return version, tensors, keys

    def _metadata(self, count: int, tensors: int) -> _Steps:
        found: dict[str, Any] = {}
        for number in range(count):
            self._promised = (count - number) * KEY_ENTRY_BYTES_MIN + tensors * TENSOR_ENTRY_BYTES_MIN
            self._place = f"key {number}"
            key = yield from self._name(self.limits.key_bytes_max, "its name")
            self._promised -= KEY_ENTRY_BYTES_MIN
            self._place = f"key {key!r}"
            if key in found:
                raise self._refused("it is there twice")
            self._keep(len(key))
            kind = yield from self._number(_U32)
            found[key] = yield from self._value(kind)
        return Metadata(found)

    def _value(self, kind: int) -> _Steps:
        if kind == STRING:
            return (yield from self._string())
        if kind == ARRAY:
            return (yield from self._array())
        if kind not in STRUCTS:
            raise self._refused(f"there is no value type {kind}")
        at = self._position
        value = yield from self._number(STRUCTS[kind])
        self._keep(8)
        if kind == BOOL:
            self._check_bool(value)
            value = bool(value)
        return Scalar(kind, value, at)

    def _check_bool(self, value: int) -> None:
        if value > 1:
            raise self._refused(f"a boolean is 0 or 1, and this one is {value}")

    def _string(self) -> _Steps:
        """A string's text, or None in place of a long one."""
        at = self._position
        length = yield from self._number(_U64)
        if length > self.limits.string_bytes_max:
            raise self._refused(f"a string of {length} bytes, and {self.limits.string_bytes_max} are allowed")
        self._reserve(length, f"a string of {length} bytes")
        if length > self.limits.string_bytes_kept:
            yield from self._pass_over(length)
            return Scalar(STRING, None, at)
        yield from self._need(length)
        self._keep(length)
        text = self._buffer[self._at : self._at + length].decode(errors="replace")
        self._at += length
        return Scalar(STRING, text, at)

    # Arrays are walked; short ones of numbers are kept.

    def _array(self, depth: int = 1) -> _Steps:
        if depth > self.limits.array_depth_max:
            raise self._refused(f"arrays lie more than {self.limits.array_depth_max} deep in one another")
        at = self._position
        kind = yield from self._number(_U32)
        count = yield from self._number(_U64)
        if kind not in ITEM_BYTES_MIN:
            raise self._refused(f"there is no value type {kind} for an array's items")
        self._reserve(count * ITEM_BYTES_MIN[kind], f"an array of {count} items")
        if kind in (STRING, ARRAY):
            self._walk(kind, count)
        if kind == STRING:
            yield from self._pass_over_strings(count)
        elif kind == ARRAY:
            for _ in range(count):
                yield from self._array(depth + 1)
        elif depth == 1 and count <= self.limits.array_items_kept:
            return (yield from self._numbers(kind, count, at))
        else:
            yield from self._pass_over(count * ITEM_BYTES_MIN[kind])
        return Items(kind, count, None, at)

    def _numbers(self, kind: int, count: int, at: int) -> _Steps:
        form = STRUCTS[kind]
        self._keep(8 * count)
        yield from self._need(form.size * count)
        end = self._at + form.size * count
        values = tuple(value for (value,) in form.iter_unpack(bytes(self._buffer[self._at : end])))
        self._at = end
        if kind == BOOL:
            for value in values:
                self._check_bool(value)
        return Items(kind, count, values, at)

    def _pass_over_strings(self, count: int) -> _Steps:
        """The hot loop: a vocabulary has some 10^5 strings of a few bytes. `spare` is what their texts may
        still take, so that a string is refused at the same byte whatever the pieces were."""
        length_at, longest = _U64.unpack_from, self.limits.string_bytes_max
        spare = self._room() - count * _U64.size
        while count:
            buffer, at, end = self._buffer, self._at, len(self._buffer)
            while count and at + _U64.size <= end:
                (length,) = length_at(buffer, at)
                spare -= length
                if length > longest or spare < 0:
                    self._at = at
                    raise self._refused(
                        f"a string of {length} bytes is more than is allowed, or than is left"
                    )
                at += _U64.size + length
                count -= 1
            self._at = min(at, end)
            if at > end:
                yield from self._pass_over(at - end)
            elif count:
                yield from self._need(_U64.size)

    # Tensors.

    def _alignment(self, metadata: Metadata) -> int:
        value = metadata.entries.get("general.alignment")
        if value is None:
            return ALIGNMENT_DEFAULT
        self._place = "key 'general.alignment'"
        if not isinstance(value, Scalar) or value.kind != UINT32:
            raise self._refused("it is no 32-bit number")
        number = value.value
        if not isinstance(number, int) or not 8 <= number <= ALIGNMENT_MAX or number & (number - 1):
            raise self._refused(f"{number} is no power of two from 8 to {ALIGNMENT_MAX}")
        return number

    def _tensors(self, count: int, alignment: int) -> _Steps:
        """What the tensors amount to. Their data begins at the first multiple of the alignment after the
        header, and one follows the other, each at a multiple of the alignment."""
        tally = Tally()
        names: set[str] = set()
        expected = 0
        for number in range(count):
            self._promised = (count - number - 1) * TENSOR_ENTRY_BYTES_MIN
            self._place = f"tensor {number}"
            name = yield from self._name(self.limits.tensor_name_bytes_max, "its name")
            self._place = f"tensor {name!r}"
            if name in names:
                raise self._refused("it is there twice")
            names.add(name)
            items, size, type_name, offset = yield from self._tensor()
            if offset != expected:
                raise self._refused(
                    f"its data is at {offset}, and that of the tensor before it ends at {expected}"
                )
            if self.file_bytes is not None and offset + size > self.file_bytes - self._position:
                raise self._refused(
                    f"its data ends past the end of the file, which has {self.file_bytes} bytes"
                )
            expected = -(-(offset + size) // alignment) * alignment
            tally.add(name, type_name, items, size, offset + size)
        data_at = -(-self._position // alignment) * alignment
        self._place = "the tensors"
        if count and self.file_bytes is not None and data_at + tally.end > self.file_bytes:
            raise self._refused(
                f"their data ends past the end of the file, which has {self.file_bytes} bytes"
            )
        return tally

    def _tensor(self) -> _Steps:
        dimensions = yield from self._number(_U32)
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise self._refused(f"it has {dimensions} dimensions, and 1 to {DIMENSIONS_MAX} are allowed")
        items, row = 1, 0
        for number in range(dimensions):
            length = yield from self._number(_U64)
            items *= length
            if length == 0:
                raise self._refused(f"dimension {number} is 0")
            if items > ITEMS_MAX:
                raise self._refused("its dimensions multiply to 2^63 or more")
            row = row or length
        kind = yield from self._number(_U32)
        if kind not in TENSOR_TYPES:
            raise self._refused(f"there is no tensor type {kind}")
        form = TENSOR_TYPES[kind]
        if row % form.block_items:
            raise self._refused(
                f"a row of {row} numbers is not made of {form.name} blocks of {form.block_items}"
            )
        offset = yield from self._number(_U64)
        return items, items // form.block_items * form.block_bytes, form.name, offset
