"""Packed bodies: what is taken, and that unpacking never makes more at once than it says (G13)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.errors import Refused
from ficc.protocol.content_coding import STEP_BYTES_MAX, Coding, Unpacking, coding_of
from support.packing import PACK, zstd

both = pytest.mark.parametrize("coding", PACK)


def unpacked(coding: Coding, data: bytes) -> bytes:
    unpacking, plain = Unpacking(coding, data), b""
    while piece := unpacking.step():
        plain += piece
    return plain


@pytest.mark.parametrize(
    ("fields", "coding"),
    [
        ([b"gzip"], "gzip"),
        ([b"GZIP "], "gzip"),
        ([b"x-gzip"], "gzip"),
        ([b"gzip", b"identity"], "gzip"),
        ([b"identity, gzip"], "gzip"),
        ([b"zstd"], "zstd"),
        ([b"Zstd, identity"], "zstd"),
        ([b"identity"], None),
        ([b"identity", b"Identity"], None),
        ([b""], None),
    ],
)
def test_g13_which_codings_are_taken(fields: list[bytes], coding: Coding | None) -> None:
    assert coding_of(fields) == coding


@pytest.mark.parametrize(
    "fields",
    [[b"br"], [b"deflate"], [b"gzip", b"gzip"], [b"zstd, gzip"], [b"gzip, br"], [b"dcz"], [b"*"]],
)
def test_g13_others_are_refused_by_the_name_of_what_is_taken(fields: list[bytes]) -> None:
    with pytest.raises(Refused, match="gzip, zstd") as caught:
        coding_of(fields)
    assert (caught.value.code, caught.value.param) == ("unsupported_media_type", "content-encoding")


@both
@given(data=st.binary(max_size=5000))
def test_g13_what_was_packed_comes_back(coding: Coding, data: bytes) -> None:
    assert unpacked(coding, PACK[coding](data)) == data


@both
def test_g13_a_bomb_is_unpacked_step_by_step(coding: Coding) -> None:
    unpacking = Unpacking(coding, PACK[coding](bytes(8 * STEP_BYTES_MAX)))
    steps = [len(unpacking.step()) for _ in range(9)]
    assert steps == [STEP_BYTES_MAX] * 8 + [0]


def test_g13_zstd_takes_no_more_memory_than_its_coding_allows() -> None:
    """RFC 9659: a decoder need not keep more than 8 MB. Without a content size the window is what was asked for."""
    data = bytes(1000)
    for log, fits in ((23, True), (24, False), (27, False)):
        asked = {zstd.CompressionParameter.window_log: log, zstd.CompressionParameter.content_size_flag: 0}
        packer = zstd.ZstdCompressor(options=asked)
        packed = packer.compress(data) + packer.flush()
        if fits:
            assert unpacked("zstd", packed) == data
        else:
            with pytest.raises(Refused, match="zstd"):
                unpacked("zstd", packed)


PLAIN = b'{"a": 1}' * 100
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "plain": lambda _: PLAIN,
    "cut at its end": lambda packed: packed[:-1],
    "cut": lambda packed: packed[:12],
    "more": lambda packed: packed + b"x",
    "twice": lambda packed: packed + packed,
}


@both
@pytest.mark.parametrize("name", BROKEN)
def test_g13_a_body_that_is_not_what_it_says_is_refused(coding: Coding, name: str) -> None:
    with pytest.raises(Refused, match=coding) as caught:
        unpacked(coding, BROKEN[name](PACK[coding](PLAIN)))
    assert (caught.value.code, caught.value.param) == ("invalid_body", "content-encoding")


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", gzip.compress(PLAIN)[:-8] + bytes(8)),
        ("zstd", zstd.compress(PLAIN, options={zstd.CompressionParameter.checksum_flag: 1})[:-4] + bytes(4)),
        ("gzip", zlib.compress(PLAIN)),
        ("gzip", zstd.compress(PLAIN)),
        ("zstd", gzip.compress(PLAIN)),
    ],
    ids=["checksum of gzip", "checksum of zstd", "zlib", "zstd as gzip", "gzip as zstd"],
)
def test_g13_what_another_made_is_refused(coding: Coding, data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        unpacked(coding, data)
    assert (caught.value.code, caught.value.param) == ("invalid_body", "content-encoding")
