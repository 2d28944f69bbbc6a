"""Identifiers: their alphabet, both directions, and their order in time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import ids
from ficc.inference.schema import ID_PATTERN

MILLISECONDS = st.integers(0, 2**48 - 1)
RANDOMNESS = st.binary(min_size=10, max_size=10)


def test_the_alphabet_is_crockfords_in_lower_case_and_in_order() -> None:
    assert ids.ALPHABET == "0123456789abcdefghjkmnpqrstvwxyz"
    assert len(ids.ALPHABET) == 32
    assert list(ids.ALPHABET) == sorted(ids.ALPHABET)
    assert not set("ilou") & set(ids.ALPHABET)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (bytes(16), "0" * 26),
        (b"\xff" * 16, "7" + "z" * 25),
        (bytes(15) + b"\x01", "0" * 25 + "1"),
        (bytes(15) + b"\x20", "0" * 24 + "10"),
        (b"\x80" + bytes(15), "4" + "0" * 25),
    ],
)
def test_golden_forms(raw: bytes, text: str) -> None:
    assert ids.from_bytes(raw) == text
    assert ids.to_bytes(text) == raw


@given(st.binary(min_size=16, max_size=16))
def test_bytes_and_text_are_the_same_thing(raw: bytes) -> None:
    text = ids.from_bytes(raw)
    assert ids.to_bytes(text) == raw
    assert ids.is_id(text)
    assert len(text) == ids.LENGTH
    assert set(text) <= set(ids.ALPHABET)


@given(MILLISECONDS, RANDOMNESS, MILLISECONDS, RANDOMNESS)
def test_text_sorts_by_time_of_making_first(a: int, r: bytes, b: int, s: bytes) -> None:
    first, second = ids.make(a, r), ids.make(b, s)
    assert (first < second) == ((a, r) < (b, s))
    assert ids.to_bytes(first) == a.to_bytes(6, "big") + r


@given(st.text(alphabet=ids.ALPHABET + "ilouABZ-\n", min_size=24, max_size=28) | st.text(max_size=30))
def test_what_is_an_id_has_bytes_and_nothing_else_has(text: str) -> None:
    """The schema's pattern, which guards the edge, says the same."""
    assert ids.is_id(text) == (re.fullmatch(ID_PATTERN.removesuffix("$"), text) is not None)
    if ids.is_id(text):
        assert ids.from_bytes(ids.to_bytes(text)) == text
    else:
        with pytest.raises(ValueError, match="not an identifier"):
            ids.to_bytes(text)


@pytest.mark.parametrize("text", ["8" + "0" * 25, "0" * 25, "0" * 27, "0" * 25 + "i", "0" * 25 + "A", ""])
def test_near_misses_are_no_ids(text: str) -> None:
    assert not ids.is_id(text)


@pytest.mark.parametrize("count", [9, 11])
def test_randomness_of_another_length_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="10 random bytes"):
        ids.make(0, bytes(count))


@pytest.mark.parametrize("count", [15, 17])
def test_raw_ids_have_sixteen_bytes(count: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        ids.from_bytes(bytes(count))
