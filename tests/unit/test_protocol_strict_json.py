"""Strict JSON: what every reader reads alike passes and is equal; everything else is refused, naming the
place, quickly whatever it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ficc.protocol import strict_json
from ficc.protocol.strict_json import DEPTH_MAX, INTEGER_DIGITS_MAX, NotJson, members, parse

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=15)
NUMBERS = st.integers(-(10**INTEGER_DIGITS_MAX) + 1, 10**INTEGER_DIGITS_MAX - 1) | st.floats(
    allow_nan=False, allow_infinity=False
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=25,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=6)


@st.composite
def written(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> tuple[Any, bytes]:
    """A value, and one of the ways to write it."""
    value = draw(values)
    indent, ascii_only = draw(st.none() | st.integers(0, 3)), draw(st.booleans())
    return value, json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()


def refusal(data: bytes, read: Callable[..., Any] = parse, **bounds: int) -> NotJson:
    with pytest.raises(NotJson) as caught:
        read(data, **bounds)
    return caught.value


def both(data: bytes) -> NotJson:
    """The refusal, which is the same from either reader."""
    one, other = refusal(data), refusal(data, members)
    assert str(one) == str(other)
    return one


# What passes.


@given(written(VALUES))
def test_whatever_json_writes_is_read_as_itself(made: tuple[Any, bytes]) -> None:
    value, data = made
    assert parse(data) == value


@given(written(OBJECTS))
def test_members_are_what_an_object_holds_and_where(made: tuple[dict[str, Any], bytes]) -> None:
    value, data = made
    found = members(data)
    assert {name: member.value for name, member in found.members.items()} == value
    assert found.text.encode() == data
    for member in found.members.values():
        assert json.loads(found.text[member.start : member.end]) == member.value


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'\t{\r\n "a" :\n[ ] } ', {"a": []}),
        (b'{"":0}', {"": 0}),
        (b'{"a":"\\ud83d\\ude00"}', {"a": "😀"}),
        (b'{"a":"\\\\ud83d"}', {"a": "\\ud83d"}),
        ('{"a":"😀\u2028"}'.encode(), {"a": "😀\u2028"}),
        (b'{"a":"NaN, Infinity, [[[[ and 1234567890123456789012345"}', None),
        (
            b'{"a":0.1234567890123456789012345,"b":1.5e-400,"c":-0.0}',
            {"a": 0.12345678901234568, "b": 0, "c": 0},
        ),
        (b'{"a":18446744073709551615,"b":-9223372036854775808}', {"a": 2**64 - 1, "b": -(2**63)}),
        (b'{"a":1.7976931348623157e308}', {"a": 1.7976931348623157e308}),
    ],
)
def test_unusual_and_right(data: bytes, value: Any) -> None:
    assert parse(data) == (value if value is not None else json.loads(data))
    assert members(data).get("a") == parse(data).get("a")


# Putting one member in.


@given(written(OBJECTS), TEXT, VALUES)
def test_one_member_changes_and_nothing_else_does(
    made: tuple[dict[str, Any], bytes], name: str, value: Any
) -> None:
    before, data = made
    found = members(data)
    place = found.place(name)
    after = place.filled(data, value)
    assert json.loads(after) == {**before, name: value}
    assert parse(after) == {**before, name: value}
    assert after.startswith(data[: place.start])
    assert after.endswith(data[place.end :])
    if name in before:
        assert json.loads(data[place.start : place.end]) == before[name]
    else:
        assert place.start == place.end == data.index(b"{") + 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"{}", '{"model": "m"}'),
        (b" { } ", ' {"model": "m" } '),
        (b'{"a":1}', '{"model": "m", "a":1}'),
        (b'{"a":{"model":1},"model" : null }', '{"a":{"model":1},"model" : "m" }'),
        (b'{"model":"x","b":1e5}', '{"model":"m","b":1e5}'),
        (b'{"b":"\\u0041\\/","m\\u006fdel":[1]}', '{"b":"\\u0041\\/","m\\u006fdel":"m"}'),
    ],
)
def test_a_member_is_replaced_where_it_stands_or_put_first(before: bytes, after: str) -> None:
    assert members(before).place("model").filled(before, "m").decode() == after


# Duplicates.


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'{"a":1,"a":1}', "a"),
        (b'{"a":1,"b":2,"\\u0061":3}', "a"),
        (b'{"x":[{"y":{"b":1,"b":2}}]}', "b"),
        (b'{"":1,"":2}', ""),
        (b'{"x":{"' + b"n" * 500 + b'":1,"' + b"n" * 500 + b'":1}}', "n" * 64),
        (b'{"x":{"\\ud800":1,"\\ud800":1}}', "\\ud800"),
    ],
)
def test_g20_a_member_that_stands_twice_is_refused_by_name(data: bytes, place: str) -> None:
    refused = both(data)
    assert refused.place == place
    assert "stands twice" in str(refused)
    str(refused).encode()


@given(st.integers(0, 60))
def test_g20_at_any_depth(depth: int) -> None:
    data = b'{"x":' * depth + b'{"a":1,"a":2}' + b"}" * depth
    assert both(data).place == "a"


def test_g20_one_name_in_two_objects_is_no_duplicate() -> None:
    assert parse(b'[{"a":1},{"a":2},{"b":{"a":{"a":3}}}]') == [{"a": 1}, {"a": 2}, {"b": {"a": {"a": 3}}}]


# Numbers.


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_g20_what_is_no_number_is_refused_by_its_place(constant: bytes) -> None:
    refused = both(b'{"x NaN":"Infinity","a":[1,' + constant + b"]}")
    assert refused.place == f"byte {27 + constant.startswith(b'-')}"


@pytest.mark.parametrize("sign", [b"", b"-"])
def test_g20_an_integer_at_the_limit_of_digits_and_one_past_it(sign: bytes) -> None:
    fine, past = sign + b"9" * 20, sign + b"9" * 21
    assert parse(b'{"a":' + fine + b"}") == {"a": int(fine)}
    data = b'{"x":"' + b"1" * 30 + b'","y":0.' + b"1" * 30 + b',"a":' + past + b"}"
    refused = both(data)
    assert "more than 20 digits" in str(refused)
    assert refused.place == f"byte {data.index(past)}"


def test_g20_an_integer_of_400_digits() -> None:
    assert both(b'{"seed":' + b"7" * 400 + b"}").place == "byte 8"


@pytest.mark.parametrize(
    "number", [b"1e309", b"-1e309", b"1E+400", b"123456e305", b"1" * 400 + b".0", b"1e" + b"9" * 99]
)
def test_a_number_that_becomes_infinite_is_refused(number: bytes) -> None:
    refused = both(b'{"a":[' + number + b"]}")
    assert "too large" in str(refused)
    assert refused.place == number[:64].decode()


# Surrogates.


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'{"a":"\\ud83d"}', "a"),
        (b'{"a":"\\ude00"}', "a"),
        (b'{"a":"\\uDE00\\uD83D"}', "a"),
        (b'{"a":"\\ud83d \\ude00"}', "a"),
        (b'{"messages":[{"content":"hi"},{"content":"\\ud83dx"}]}', "messages[1].content"),
        (b'{"a":{"\\udfff":1}}', "a.\\udfff"),
        (b'{"\\ud800":1}', "\\ud800"),
    ],
)
def test_g20_half_a_surrogate_pair_is_refused_by_its_place(data: bytes, place: str) -> None:
    refused = both(data)
    assert refused.place == place
    assert "half a surrogate pair" in str(refused)
    str(refused).encode()


def test_half_a_pair_as_bytes_is_not_utf_8() -> None:
    assert both(b'{"a":"\xed\xa0\xbd"}').place == "byte 6"


# Depth and number of values.

OPENERS = st.lists(st.sampled_from(["[", '{"a":']), min_size=0, max_size=12)


def nested(openers: list[str]) -> bytes:
    closers = "".join("]" if opener == "[" else "}" for opener in reversed(openers))
    return ("".join(openers) + "0" + closers).encode()


@given(OPENERS, st.integers(1, 12))
def test_depth_is_counted_whatever_the_brackets(openers: list[str], depth_max: int) -> None:
    """Objects in arrays in objects nest as deep as arrays alone."""
    data = nested(openers)
    if len(openers) <= depth_max:
        parse(data, depth_max=depth_max)
    else:
        refused = refusal(data, depth_max=depth_max)
        assert f"deeper than {depth_max}" in str(refused)
        assert refused.place == f"byte {len(''.join(openers[:depth_max]))}"


@pytest.mark.parametrize("opener", [["["], ['{"a":'], ['{"a":', "["]])
def test_g20_depth_at_the_limit_and_one_past_it(opener: list[str]) -> None:
    levels = (opener * DEPTH_MAX)[: DEPTH_MAX + 1]
    parse(nested(levels[:DEPTH_MAX]))
    assert "deeper than 64" in str(refusal(nested((opener * 65)[:65])))


def test_g20_nesting_3000_deep() -> None:
    for bracket in ("[", '{"a":'):
        assert both(b'{"x":' + nested([bracket] * 3000) + b"}").place is not None


def test_what_was_closed_before_does_not_count_to_the_depth() -> None:
    refused = refusal(b'{"a":[[]],"b":{},"c":[[[0]]]}', depth_max=3)
    assert refused.place == "byte 23"


def test_brackets_in_strings_do_not_nest() -> None:
    text = "[{" * 200 + '"\\' * 50
    assert parse(json.dumps({"a": text}).encode(), depth_max=1) == {"a": text}


def test_many_values_side_by_side_do_not_nest() -> None:
    assert len(parse(b"[" + b",".join([b"[{}]"] * 500) + b"]", depth_max=3)) == 500


@pytest.mark.parametrize(
    "data", [b"[0,0,0,0]", b'{"a":0,"b":0,"c":0,"d":0}', b'[[0],{"a":""}]', b'{"aa":["b","c"],"d":"e"}']
)
def test_values_at_the_limit_and_one_past_it(data: bytes) -> None:
    """A container counts, and each of its values."""
    parse(data, values_max=5)
    assert "more than 4 values" in str(refusal(data, values_max=4))


def test_separators_in_strings_are_no_values() -> None:
    parse(b'["' + b",[{" * 100 + b'"]', values_max=2)


def test_escaped_quotes_are_no_values() -> None:
    text = '"' * 1000 + '\\"' * 1000
    assert parse(json.dumps([text]).encode(), values_max=2) == [text]


# Malformed text.

MALFORMED = [
    *(
        b"",
        b" ",
        b"{",
        b"}",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b'{"a":1 "b":2}',
        b'{"a" 1}',
    ),
    *(
        b"{a:1}",
        b"{'a':1}",
        b'{"a":1}}',
        b'{"a":1}x',
        b'{"a":1} {}',
        b"{,}",
        b'{"a":}',
        b'{"a":-}',
        b'{"a":01}',
    ),
    *(
        b'{"a":1.}',
        b'{"a":.5}',
        b'{"a":+1}',
        b'{"a":0x1}',
        b'{"a":1e}',
        b'{"a":tru}',
        b'{"a":True}',
        b'{"a":[1,]}',
    ),
    *(b'{"a":"\n"}', b'{"a":"\x00"}', b'{"a":"\\x"}', b'{"a":"\\u12"}', b'{"a":"', b'{"a":"\\', b'{"a":"\\"'),
    *(b"\xef\xbb\xbf{}", b"\xff{}", b'{"a":"\xc0\xaf"}', b"{\x0b}", b"{\xc2\xa0}", b"// x\n{}", b"[}", b"{]"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"]" * 100_000, b'{"a":"' + b'\\"' * 50_000),
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: repr(data[:16]))
def test_what_is_malformed_is_refused_by_either_reader(data: bytes) -> None:
    refusal(data)
    refusal(data, members)


@pytest.mark.parametrize("data", [b"[]", b"null", b'"x"', b"5", b'["a"]'])
def test_a_body_is_an_object(data: bytes) -> None:
    parse(data)
    assert "not a JSON object" in str(refusal(data, members))


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'{"a":1,}', "character 7"),
        (b'{"a" 1}', "character 5"),
        (b'{"a":1 "b":2}', "character 7"),
        (b'{"a":}', "character 5"),
        (b'{"a":1}x', "character 7"),
        (b'{"a":1', "character 6"),
        ('{"é":"\n"}'.encode(), "character 6"),
    ],
)
def test_a_malformed_body_names_the_place(data: bytes, place: str) -> None:
    refused = refusal(data, members)
    assert refused.place == place
    assert f"({place})" in str(refused)


# Anything at all.

FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *(
                b"{",
                b"}",
                b"[",
                b"]",
                b",",
                b":",
                b'"',
                b"\\",
                b'\\"',
                b"\\u",
                b"d800",
                b"\\ud83d",
                b"1",
                b"e",
            ),
            *(
                b"-",
                b".",
                b"9" * 21,
                b"NaN",
                b"Infinity",
                b"true",
                b"null",
                b" ",
                b"\n",
                b"a",
                b'"a":',
                b"\xff",
            ),
            *(b"\xc3\xa9", b"\x00"),
        ]
    ),
    max_size=25,
).map(b"".join)


def accepts(read: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        read(data)
    except NotJson as refused:
        str(refused).encode()
        (refused.place or "").encode()
        return False
    return True


@settings(max_examples=500)
@given(st.binary(max_size=60) | FRAGMENTS)
def test_only_a_refusal_ever_comes_out_and_both_readers_agree(data: bytes) -> None:
    is_object = accepts(parse, data) and isinstance(parse(data), dict)
    assert accepts(members, data) == is_object
    if accepts(parse, data):
        assert json.loads(data) == parse(data)


def test_hostile_megabytes_take_no_longer_than_friendly_ones() -> None:
    """Each of these took minutes, or seconds, by some obvious way to read it."""
    size = 1 << 20
    hostile = [
        b'"' + b'\\"' * (size // 2),
        b'""' * (size // 2),
        b"\\" * size,
        b'{"a":' + b"]" * size,
        b"[" * size,
        b"[]" * (size // 2),
        b'{"a":' + b"1" * size + b".0}",
        b'{"a":' + b"-" * size + b"}",
        b'{"a":"' + b"\\ud83d" * (size // 6) + b'"}',
        b'{"a":[' + b"9" * 21 + b"," * 1000 + b" " * size,
    ]
    began = time.monotonic()
    for data in hostile:
        refusal(data)
        refusal(data, members)
    assert time.monotonic() - began < 10


def test_the_limits_are_named() -> None:
    assert (strict_json.DEPTH_MAX, strict_json.VALUES_MAX) == (64, 262_144)


@pytest.mark.parametrize(
    ("data", "values_max", "place"),
    [
        (b"[1,2,3]", 3, "byte 5"),
        (b'{"a":"[,{",  "b":[1]}', 3, "byte 18"),
        (b'{"a":1,"b":2,"c":3}', 2, "byte 7"),
        (b'"' * 100, 2, "byte 100"),
    ],
)
def test_g20_a_value_too_many_is_named_by_its_place(data: bytes, values_max: int, place: str) -> None:
    with pytest.raises(NotJson, match=f"more than {values_max} values") as caught:
        parse(data, values_max=values_max)
    assert caught.value.place == place


@pytest.mark.parametrize("closed", [0, 1, 2999])
def test_g20_nesting_that_is_never_closed_is_named_by_its_place(closed: int) -> None:
    data = b'{"a":' + b"[" * 3000 + b"]" * closed + b"}"
    for read in (parse, members):
        with pytest.raises(NotJson) as caught:
            read(data)
        assert caught.value.place is not None


# The short way of bodies that cannot break a bound.


@given(
    st.lists(
        st.sampled_from(
            [
                b"[",
                b"]",
                b"{",
                b"}",
                b",",
                b":",
                b'"',
                b"\\",
                b"NaN",
                b"Infinity",
                b"1" * 11,
                b"0.5",
                b" ",
                b"a",
            ]
        ),
        max_size=40,
    ).map(b"".join)
)
def test_what_looks_plain_breaks_no_bound(data: bytes) -> None:
    if strict_json._is_plain(data, depth_max=3, values_max=20):
        try:
            strict_json._check_bounds(data, depth_max=3, values_max=20)
        except strict_json.NotJson:
            # What stands on both sides of a string is no neighbour; a parser refuses it in any case.
            with pytest.raises(strict_json.NotJson):
                strict_json.parse(data, depth_max=10**6, values_max=10**6)


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ('{"a":1,"a":2}', False),
        ('{"\\u0061":1,"a":2}', False),
        ('{"a\\u0062":1}', True),
        ('{"é" : 1 ,\n"b":\t2 }', True),
        ('{"a\tb":1}', False),
        ('{"a" 1}', False),
        ("{a:1}", False),
        ('{"a":1,}', False),
        ('{"":1}', True),
    ],
)
def test_members_with_names_of_every_kind(text: str, fine: bool) -> None:
    try:
        found = strict_json.members(text.encode())
    except strict_json.NotJson:
        assert not fine
        return
    assert fine
    assert {name: member.value for name, member in found.members.items()} == json.loads(text)
    for member in found.members.values():
        assert json.loads(text[member.start : member.end]) == member.value
