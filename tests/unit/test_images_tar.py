"""The tar reader against what `tarfile` writes, the headers against what `tarfile` reads, and headers that
nobody well-meaning writes."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.errors import Refused
from ficc.images.tar import END, EXTENDED_BYTES_MAX, Kind, TarReader, header, padding
from support.oci_layouts import Bytes, folder, hard_link, layer, link, member

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def read(data: bytes) -> list[tuple[bytes, Kind, int, bytes, bytes]]:
    reader = TarReader(Bytes(data))
    return [
        (entry.name, entry.kind, entry.mode, entry.target, b"".join(reader.content())) for entry in reader
    ]


def raw_header(name: bytes = b"f", size: bytes = b"00000000000", flag: bytes = b"0", **at: bytes) -> bytes:
    """A header whose fields may be anything, with a right checksum unless `sum` is given."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:107] = b"0000644"
    block[124 : 124 + len(size)] = size
    block[156:157] = flag
    block[257:265] = at.get("magic", b"ustar\x0000")
    block[148:156] = at.get("sum", b"%06o\0 " % (sum(block) + 8 * 32))
    return bytes(block)


@pytest.mark.parametrize("format", FORMATS)
def test_every_kind_and_long_names_in_every_format(format: int) -> None:
    deep = "/".join(["d" * 60] * 2) + "/" + "f" * 60
    members = [
        folder("etc"),
        member("etc/a", b"hello", mode=0o4755),
        member(deep, b"x" * 1000),
        link("b", "/etc/a"),
        hard_link("c", "etc/a"),
        member("dev/null", kind=tarfile.CHRTYPE),
        member("pipe", kind=tarfile.FIFOTYPE),
    ]
    found = read(layer(*members, format=format))
    assert [(name.rstrip(b"/"), kind) for name, kind, *_ in found] == [
        (b"etc", Kind.DIRECTORY),
        (b"etc/a", Kind.FILE),
        (deep.encode(), Kind.FILE),
        (b"b", Kind.SYMLINK),
        (b"c", Kind.HARD_LINK),
        (b"dev/null", Kind.CHARACTER_DEVICE),
        (b"pipe", Kind.FIFO),
    ]
    assert [content for *_, content in found if content] == [b"hello", b"x" * 1000]
    assert found[1][2] == 0o4755
    assert [found[3][3], found[4][3]] == [b"/etc/a", b"etc/a"]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_targets_beyond_ustar(format: int) -> None:
    name, target = "n/" * 150 + "é", "t" * 300
    found = read(layer(member(name, b"1"), link("l", target), format=format))
    assert [(entry[0], entry[3]) for entry in found] == [(name.encode(), b""), (b"l", target.encode())]


def test_times_are_whole_seconds_and_strange_ones_count_as_zero() -> None:
    infos = [member("plain", mtime=1700000000), member("half", mtime=5), member("before", mtime=-1)]
    infos[1][0].mtime = 5.75  # type: ignore[assignment]  # tarfile takes it, as a pax record
    entries = list(TarReader(Bytes(layer(*infos))))
    assert [entry.mtime for entry in entries] == [1700000000, 5, 0]


def test_content_that_is_not_taken_is_skipped() -> None:
    reader = TarReader(Bytes(layer(member("a", b"a" * 5000), member("b", b"b"))))
    names = []
    for entry in reader:
        names.append(entry.name)
        if entry.name == b"b":
            assert b"".join(reader.content()) == b"b"
    assert names == [b"a", b"b"]


def test_an_archive_may_end_without_zeros() -> None:
    assert [name for name, *_ in read(raw_header())] == [b"f"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (raw_header(sum=b"000000\0 "), "checksum does not match"),
        (raw_header(size=b"x"), "size is not a number"),
        (raw_header(size=b"\xff" * 12), "size is not a number"),
        (raw_header(size=b"00000000010"), "ends inside an entry"),
        (raw_header()[:300], "ends inside a header"),
        (raw_header(flag=b"S"), "sparse"),
        (raw_header(flag=b"Z"), "unknown type"),
        (raw_header(name=b""), "unusable name"),
        (raw_header(flag=b"x", size=b"00000000011"), "ends inside an entry"),
        (raw_header(flag=b"x", size=b"%011o" % (EXTENDED_BYTES_MAX + 1)), "header extension"),
        (raw_header(flag=b"L", size=b"\x80" + b"\xff" * 11), "header extension"),
        (
            raw_header(flag=b"x", size=b"%011o" % 9) + b"9 path=a\n".ljust(512, b"\0"),
            "ends after an extended header",
        ),
    ],
)
def test_hostile_headers_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(Refused, match=says) as caught:
        read(data)
    assert caught.value.code == "image_refused"


@pytest.mark.parametrize(
    "records",
    [b"10 path=", b"x path=a\n", b"0 path=a\n", b"3 a\n", b"9999 path=a\n", b"-5 path=a\n", b"11 path:abc\n"],
)
def test_malformed_pax_records_are_refused(records: bytes) -> None:
    data = raw_header(flag=b"x", size=b"%011o" % len(records)) + records + padding(len(records))
    with pytest.raises(Refused, match="pax header is malformed"):
        read(data + raw_header())


@pytest.mark.parametrize(
    ("flag", "record", "says"),
    [
        (b"x", b"size=-1", "size is not a number"),
        (b"x", b"GNU.sparse.major=1", "sparse"),
        (b"x", b"path=a\0b", "unusable name"),
        (b"g", b"path=a", "global pax header sets 'path'"),
        (b"g", b"size=9", "global pax header sets 'size'"),
    ],
)
def test_pax_records_that_lead_readers_astray_are_refused(flag: bytes, record: bytes, says: str) -> None:
    records = b"%d %b\n" % (len(record) + 4, record)
    assert len(records) == len(record) + 4
    data = raw_header(flag=flag, size=b"%011o" % len(records)) + records + padding(len(records))
    with pytest.raises(Refused, match=says):
        read(data + raw_header())


def test_a_large_file_is_read_in_pieces() -> None:
    stream = Bytes(layer(member("big", bytes(3 << 20))))
    reader = TarReader(stream)
    for _ in reader:
        assert sum(len(piece) for piece in reader.content()) == 3 << 20
    assert stream.largest <= 1 << 18


@given(
    name=st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=400
    ).filter(lambda name: not name.startswith("/") and not name.endswith("/")),
    target=st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300
    ),
    mode=st.integers(0, 0o7777),
    data=st.binary(max_size=2000),
)
def test_headers_are_read_back_by_tarfile_and_by_us(name: str, target: str, mode: int, data: bytes) -> None:
    raw, raw_target = name.encode(), target.encode()
    archive = (
        header(raw, Kind.FILE, mode=mode, size=len(data))
        + data
        + padding(len(data))
        + header(raw, Kind.SYMLINK, mode=0o777, target=raw_target)
        + END
    )
    assert read(archive) == [
        (raw, Kind.FILE, mode, b"", data),
        (raw, Kind.SYMLINK, 0o777, raw_target, b""),
    ]
    with tarfile.open(fileobj=io.BytesIO(archive), encoding="utf-8") as theirs:
        file, symlink = theirs.getmembers()
        content = theirs.extractfile(file)
        assert content is not None
        assert (file.name, file.mode, content.read()) == (name, mode, data)
        assert (file.uid, file.gid, file.mtime, file.uname, file.gname) == (0, 0, 0, "", "")
        assert (symlink.name, symlink.linkname) == (name, target)


def test_a_name_needs_pax_only_where_ustar_cannot_hold_it() -> None:
    assert len(header(b"a" * 100, Kind.FILE, mode=0o644)) == 512
    assert len(header(b"d" * 155 + b"/" + b"f" * 100, Kind.FILE, mode=0o644)) == 512
    assert len(header(b"a" * 101, Kind.FILE, mode=0o644)) == 3 * 512
    assert len(header("é".encode(), Kind.FILE, mode=0o644)) == 3 * 512


def test_a_size_beyond_eight_gibibytes_is_a_pax_record() -> None:
    size = 9 << 30
    (entry,) = list(TarReader(Bytes(header(b"big", Kind.FILE, mode=0o644, size=size))))[:1]
    assert entry.size == size


def test_a_name_that_is_not_utf_8_cannot_be_written() -> None:
    with pytest.raises(Refused, match="not UTF-8"):
        header(b"\xff", Kind.FILE, mode=0o644)
