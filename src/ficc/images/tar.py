"""A forward-only reader of tar archives and a writer of deterministic headers.

The standard library's `tarfile` reads an extended header of any declared size into memory, and versions
in use loop for ever on hostile headers; a layer is somebody else's bytes, so this reader is our own. It
reads ustar, pax and GNU long names, refuses sparse files and everything it does not know, and holds at
most `EXTENDED_BYTES_MAX` of an archive.

Sources: POSIX.1-2017 "pax" (ustar and extended headers), GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ficc.images.limits import CHUNK_BYTES, refused

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
EXTENDED_BYTES_MAX = 1 << 20
"""Of one pax header or one GNU long name."""
USTAR_SIZE_MAX = 8**11 - 1
MTIME_SECONDS_MAX = 1 << 33


class Kind(Enum):
    FILE = b"0"
    HARD_LINK = b"1"
    SYMLINK = b"2"
    CHARACTER_DEVICE = b"3"
    BLOCK_DEVICE = b"4"
    DIRECTORY = b"5"
    FIFO = b"6"


@dataclass(frozen=True, slots=True)
class Entry:
    name: bytes  # as recorded: may be absolute, may hold ".."
    kind: Kind
    mode: int  # permission bits, 12 of them
    size: int  # bytes of content that follow; 0 for all but files
    target: bytes  # of links
    mtime: int  # seconds since 1970
    offset: int  # where the content starts in the archive


class Stream(Protocol):
    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, or fewer at the end of the stream."""

    def skip(self, size: int) -> None:
        """As `read`, keeping nothing; going past the end shows at the next read."""


class TarReader:
    """Iterates over the entries of a stream. `content()` gives the bytes of the entry just returned;
    what is not taken of them is skipped."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._position = 0
        self._content_end = 0  # of the current entry
        self._next_header = 0

    def __iter__(self) -> Iterator[Entry]:
        while (entry := self._next()) is not None:
            yield entry

    def content(self) -> Iterator[bytes]:
        while self._position < self._content_end:
            yield self._take(min(CHUNK_BYTES, self._content_end - self._position))

    def _next(self) -> Entry | None:
        extended: dict[str, bytes] = {}
        while (block := self._header_block()) is not None:
            kind = block[156:157]
            size = _number(block[124:136], "size")
            match kind:
                case b"x":
                    extended |= _pax_records(self._extended(size))
                case b"g":
                    _check_global(_pax_records(self._extended(size)))
                case b"L":
                    extended["path"] = self._extended(size).rstrip(b"\0")
                case b"K":
                    extended["linkpath"] = self._extended(size).rstrip(b"\0")
                case _:
                    return self._entry(block, extended)
        if extended:
            raise refused("a tar archive ends after an extended header")
        return None

    def _header_block(self) -> bytes | None:
        """The next header, or None at the end: a block of zeros, or the end of the stream."""
        self._stream.skip(self._next_header - self._position)
        block = self._stream.read(BLOCK_BYTES)
        self._position = self._next_header + len(block)
        if not block or block == END[:BLOCK_BYTES]:
            return None
        if len(block) < BLOCK_BYTES:
            raise refused("a tar archive ends inside a header")
        _check_sum(block)
        self._content_end = self._next_header = self._position
        return block

    def _expect(self, size: int) -> None:
        self._content_end = self._position + size
        self._next_header = self._position + -(-size // BLOCK_BYTES) * BLOCK_BYTES

    def _extended(self, size: int) -> bytes:
        if size > EXTENDED_BYTES_MAX:
            raise refused(f"a tar header extension has {size} bytes; at most {EXTENDED_BYTES_MAX} are read")
        self._expect(size)
        return self._take(size)

    def _take(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._position += len(data)
        if len(data) < size:
            raise refused("a tar archive ends inside an entry")
        return data

    def _entry(self, block: bytes, extended: dict[str, bytes]) -> Entry:
        if any(key.startswith("GNU.sparse.") for key in extended) or block[156:157] == b"S":
            raise refused("a tar archive holds a sparse file; pack it without sparse files")
        name = extended.get("path", _recorded_name(block))
        kind = _kind(block[156:157], name)
        size = 0
        if kind is Kind.FILE:
            size = _number(block[124:136], "size")
            if "size" in extended:
                size = _decimal(extended["size"], "size")
        if not name or b"\0" in name:
            raise refused(f"a tar entry has an unusable name: {shown(name)}")
        self._expect(size)
        return Entry(
            name=name,
            kind=kind,
            mode=_number(block[100:108], "mode") & 0o7777,
            size=size,
            target=extended.get("linkpath", _text(block[157:257])),
            mtime=_mtime(block, extended),
            offset=self._position,
        )


def shown(name: bytes) -> str:
    """A name from an archive, for a message: printable and short."""
    text = name.decode(errors="backslashreplace")
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= 200 else text[:200] + "…"


def _recorded_name(block: bytes) -> bytes:
    name, magic = _text(block[:100]), block[257:263]
    if magic != b"ustar\0":  # GNU and older: the prefix field holds other things
        return name
    star = block[508:512] == b"tar\0"  # Schilling's variant: a shorter prefix, then times
    prefix = _text(block[345:476] if star else block[345:500])
    return prefix + b"/" + name if prefix else name


def _kind(flag: bytes, name: bytes) -> Kind:
    if flag in (b"\0", b"7"):  # before POSIX, and "contiguous", which nothing treats differently
        flag = b"0"
    if flag == b"0" and name.endswith(b"/"):
        flag = b"5"
    try:
        return Kind(flag)
    except ValueError:
        raise refused(f"a tar archive holds an entry of unknown type {flag!r}: {shown(name)}") from None


def _check_sum(block: bytes) -> None:
    recorded = _number(block[148:156], "checksum")
    others = block[:148] + b" " * 8 + block[156:]
    signed = sum(others) - 256 * sum(byte > 127 for byte in others)  # as some old writers summed
    if recorded not in (sum(others), signed):
        raise refused("a tar header's checksum does not match")


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes, what: str) -> int:
    if field[0] == 0x80:  # base 256, for what octal digits cannot hold
        return int.from_bytes(field[1:], "big")
    digits = _text(field).strip(b" ")
    if digits.strip(b"01234567"):
        raise refused(f"a tar header's {what} is not a number")
    return int(digits or b"0", 8)


def _decimal(value: bytes, what: str) -> int:
    if not value.isdigit() or len(value) > 20:
        raise refused(f"a pax header's {what} is not a number")
    return int(value)


def _mtime(block: bytes, extended: dict[str, bytes]) -> int:
    """Whole seconds; a time outside the years that file systems hold counts as 0."""
    field = block[136:148]
    seconds = 0 if field[0] == 0xFF else _number(field, "mtime")  # 0xff: before 1970
    if "mtime" in extended:
        whole = extended["mtime"].split(b".")[0]
        seconds = int(whole) if whole.isdigit() and len(whole) <= 20 else 0
    return seconds if seconds <= MTIME_SECONDS_MAX else 0


def _pax_records(data: bytes) -> dict[str, bytes]:
    """`length key=value\\n`, repeated; the length counts the whole record in decimal digits."""
    records: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + 8)
        digits = data[start:space]
        if space < 0 or not digits.isdigit():
            raise refused("a pax header is malformed")
        end = start + int(digits)
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end <= space or not equals or data[end - 1 : end] != b"\n":
            raise refused("a pax header is malformed")
        records[key.decode(errors="replace")] = value
        start = end
    return records


def _check_global(records: dict[str, bytes]) -> None:
    """Readers disagree about global records; the ones that could change an entry are refused."""
    changing = {
        key for key in records if key in ("path", "linkpath", "size") or key.startswith("GNU.sparse.")
    }
    if changing:
        raise refused(f"a global pax header sets {sorted(changing)[0]!r}")


def header(name: bytes, kind: Kind, *, mode: int, size: int = 0, target: bytes = b"") -> bytes:
    """The header of one entry: ustar, preceded by a pax header where ustar cannot hold a value. Owner
    and group are 0, the time is 0, so that equal arguments give equal bytes."""
    records: dict[str, bytes] = {}
    prefix, short = b"", name
    if len(name) > 100:
        prefix, short = _split(name)
    if not name.isascii() or not short:
        records["path"] = _utf8(name)
        prefix, short = b"", name[:100]
    if len(target) > 100 or not target.isascii():
        records["linkpath"] = _utf8(target)
    if size > USTAR_SIZE_MAX:
        records["size"] = b"%d" % size
    block = _ustar(short, prefix, kind.value, mode, min(size, USTAR_SIZE_MAX), target[:100])
    if not records:
        return block
    data = b"".join(_pax_record(key.encode(), value) for key, value in sorted(records.items()))
    return _ustar(b"pax", b"", b"x", 0o644, len(data), b"") + data + padding(len(data)) + block


def padding(size: int) -> bytes:
    """What follows content of that size, up to the next block."""
    return bytes(-size % BLOCK_BYTES)


def _split(name: bytes) -> tuple[bytes, bytes]:
    """Prefix (at most 155 bytes) and rest (at most 100) of a long name; both empty when none fit."""
    cut = name.rfind(b"/", 0, min(156, len(name) - 1))
    if cut <= 0 or len(name) - cut - 1 > 100:
        return b"", b""
    return name[:cut], name[cut + 1 :]


def _utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        raise refused(f"a file name is not UTF-8: {shown(value)}") from None
    return value


def _pax_record(key: bytes, value: bytes) -> bytes:
    bare = len(key) + len(value) + 3  # space, equals sign, newline
    length = bare + len(str(bare))
    length = bare + len(str(length))  # its own digits may have added one
    return b"%d %b=%b\n" % (length, key, value)


def _ustar(name: bytes, prefix: bytes, flag: bytes, mode: int, size: int, target: bytes) -> bytes:
    fields = b"".join(
        (
            name.ljust(100, b"\0"),
            b"%07o\0" % mode,
            b"0000000\0" * 2,  # owner, group
            b"%011o\0" % size,
            b"00000000000\0",  # mtime
            b" " * 8,  # the checksum's place
            flag,
            target.ljust(100, b"\0"),
            b"ustar\x0000",
            bytes(64),  # names of owner and group
            b"0000000\0" * 2,  # device numbers
            prefix.ljust(155, b"\0"),
            bytes(12),
        )
    )
    return fields[:148] + b"%06o\0 " % sum(fields) + fields[156:]
