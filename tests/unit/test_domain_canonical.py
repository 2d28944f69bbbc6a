"""Canonical JSON: the bytes that RFC 8785 prescribes, with null dropped and floats refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain import canonical

TEXT = st.text(max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-canonical.INTEGER_MAX, canonical.INTEGER_MAX) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(TEXT, VALUES, max_size=5)


def test_members_are_sorted_and_nothing_is_spaced() -> None:
    document = {"b": [1, {"z": False, "y": "ü\n"}], "a": None, "aa": -0, "A": 2**53 - 1}
    assert canonical.encode(document) == (
        b'{"A":9007199254740991,"aa":0,"b":[1,{"y":"\xc3\xbc\\n","z":false}]}'
    )


def test_members_sort_by_utf_16_units() -> None:
    """RFC 8785, section 3.2.3: a character outside the basic plane counts as its surrogates."""
    assert canonical.encode({"\ue000": 1, "\U00010000": 2}) == '{"\U00010000":2,"\ue000":1}'.encode()


def test_null_members_are_dropped_at_any_depth_and_null_elements_stay() -> None:
    assert canonical.encode({"a": {"b": None, "c": [None, {"d": None}]}}) == b'{"a":{"c":[null,{}]}}'


def test_the_digest_is_of_the_canonical_bytes() -> None:
    assert canonical.digest({"b": 1, "a": None}) == hashlib.sha256(b'{"b":1}').hexdigest()


@given(DOCUMENTS)
def test_the_canonical_form_is_json_of_the_same_document(document: dict[str, Any]) -> None:
    encoded = canonical.encode(document)
    assert json.loads(encoded) == canonical.without_absent(document)
    assert canonical.encode(json.loads(encoded)) == encoded


@given(DOCUMENTS, st.randoms(use_true_random=False))
def test_the_order_of_members_does_not_count(document: dict[str, Any], random: Any) -> None:
    items = list(document.items())
    random.shuffle(items)
    assert canonical.digest(dict(items)) == canonical.digest(document)


@pytest.mark.parametrize("document", [{"a": 0.0}, {"a": [1, {"b": [2.5]}]}, {"a": (1.0,)}])
def test_floats_are_refused_wherever_they_stand(document: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="no floats"):
        canonical.encode(document)


@pytest.mark.parametrize("document", [{"a": 2**53}, {"a": -(2**53)}, {"a": "\ud800"}])
def test_what_readers_would_change_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        canonical.encode(document)
