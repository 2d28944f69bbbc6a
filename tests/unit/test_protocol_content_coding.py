"""Packed bodies: what is taken, and that unpacking never makes more at once than it says (G13)."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.errors import Refused
from ficc.protocol.content_coding import STEP_BYTES_MAX, Unpacking, is_packed


def unpacked(data: bytes) -> bytes:
    unpacking, plain = Unpacking(data), b""
    while piece := unpacking.step():
        plain += piece
    return plain


@pytest.mark.parametrize(
    ("codings", "packed"),
    [
        ([b"gzip"], True),
        ([b"GZIP "], True),
        ([b"x-gzip"], True),
        ([b"gzip", b"identity"], True),
        ([b"identity, gzip"], True),
        ([b"identity"], False),
        ([b"identity", b"Identity"], False),
        ([b""], False),
    ],
)
def test_g13_which_codings_are_taken(codings: list[bytes], packed: bool) -> None:
    assert is_packed(codings) == packed


@pytest.mark.parametrize(
    "codings", [[b"zstd"], [b"br"], [b"deflate"], [b"gzip", b"gzip"], [b"gzip, br"], [b"*"]]
)
def test_g13_others_are_refused_by_the_name_of_what_is_taken(codings: list[bytes]) -> None:
    with pytest.raises(Refused, match="gzip") as caught:
        is_packed(codings)
    assert (caught.value.code, caught.value.param) == ("unsupported_media_type", "content-encoding")


@given(st.binary(max_size=5000))
def test_g13_what_was_packed_comes_back(data: bytes) -> None:
    assert unpacked(gzip.compress(data)) == data


def test_g13_a_bomb_is_unpacked_step_by_step() -> None:
    unpacking = Unpacking(gzip.compress(bytes(8 * STEP_BYTES_MAX)))
    assert [len(unpacking.step()) for _ in range(9)] == [STEP_BYTES_MAX] * 8 + [0]


PACKED = gzip.compress(b'{"a": 1}' * 100)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"a": 1}',
        PACKED[:-1],
        PACKED[:20],
        PACKED[:-8] + bytes(8),  # another checksum
        PACKED + b"x",
        PACKED + PACKED,
        zlib.compress(b"{}"),
    ],
    ids=["nothing", "plain", "cut at its end", "cut", "checksum", "more", "twice", "zlib"],
)
def test_g13_a_body_that_is_not_what_it_says_is_refused(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        unpacked(data)
    assert (caught.value.code, caught.value.param) == ("invalid_body", "content-encoding")
