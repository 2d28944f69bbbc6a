"""What a download asks for, what each answer is good for, and how long it is patient. Rows A1 to A8 are those
of the list of faults that other systems' users reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.errors import Reason, Refused
from ficc.domain.fetching import (
    BACKOFF_SECONDS_FIRST,
    BACKOFF_SECONDS_MAX,
    ETAG_CHARACTERS_MAX,
    RESTARTS_MAX,
    RETRY_AFTER_SECONDS_MAX,
    Answer,
    Backoff,
    Body,
    Flow,
    Restart,
    Retry,
    Wanted,
    check_answer,
    check_ended,
    check_received,
    is_progress,
    next_range,
    strong_etag,
    wait_of,
)
from ficc.protocol.http_api import CODES

TOTAL = 1000
NOW = 1_800_000_000.0
FIRST = Wanted(0, TOTAL, TOTAL)
REST = Wanted(400, TOTAL, TOTAL, '"v1"')
UNTAGGED = Wanted(400, TOTAL, TOTAL)
PART = {"content-range": "bytes 400-999/1000", "content-length": "600", "etag": '"v1"'}
UNAVAILABLE = Retry(Reason("source_unavailable", "The source answers with status 503."))
STALLED = Retry(Reason("stalled", "The source has sent nothing for 30 s."))


def judged(wanted: Wanted, status: int, headers: Mapping[str, str]) -> Answer:
    return check_answer(wanted, status, headers, now=NOW)


def refusal(wanted: Wanted, status: int, headers: Mapping[str, str]) -> Refused:
    with pytest.raises(Refused) as refused:
        judged(wanted, status, headers)
    return refused.value


# What to ask for.


def test_a1_at_full_length_nothing_is_asked() -> None:
    assert next_range(TOTAL, TOTAL, 100) is None
    assert next_range(0, 0, 100) is None


@pytest.mark.parametrize(
    ("offset", "range_bytes", "expected"),
    [(0, 100, (0, 100)), (0, 5000, (0, 1000)), (950, 100, (950, 1000)), (999, 1, (999, 1000))],
)
def test_a_range_starts_at_the_offset_and_ends_in_the_file(
    offset: int, range_bytes: int, expected: tuple[int, int]
) -> None:
    assert next_range(offset, TOTAL, range_bytes, '"v1"') == Wanted(*expected, TOTAL, '"v1"')


@given(
    st.integers(0, 10**15).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))),
    st.integers(1, 2**40),
)
def test_ranges_cover_the_rest_without_going_past_it(place: tuple[int, int], range_bytes: int) -> None:
    offset, total = place
    wanted = next_range(offset, total, range_bytes)
    if wanted is None:
        assert offset == total
    else:
        assert wanted.offset == offset < wanted.end <= total
        assert wanted.end - offset <= range_bytes


@pytest.mark.parametrize("bounds", [(10, 10, 100), (11, 10, 100), (0, 101, 100), (-1, 10, 100), (0, 0, 0)])
def test_bytes_that_are_none_cannot_be_wanted(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        Wanted(*bounds)


def test_a5_a6_the_request_says_range_plain_form_and_entity_tag() -> None:
    assert REST.headers == {"range": "bytes=400-999", "accept-encoding": "identity", "if-range": '"v1"'}
    assert UNTAGGED.headers == {"range": "bytes=400-999", "accept-encoding": "identity"}


def test_the_first_byte_is_asked_for_whatever_the_entity_tag() -> None:
    assert "if-range" not in Wanted(0, 10, TOTAL, '"v1"').headers


# What an answer is good for.


@pytest.mark.parametrize(
    ("wanted", "headers", "expected"),
    [
        (REST, PART, Body(400, 1000, TOTAL, '"v1"')),
        (REST, {"content-range": "bytes 400-999/1000"}, Body(400, 1000, TOTAL, '"v1"')),
        (REST, PART | {"content-encoding": "identity"}, Body(400, 1000, TOTAL, '"v1"')),
        (UNTAGGED, PART, Body(400, 1000, TOTAL, '"v1"')),
        (UNTAGGED, {"content-range": "bytes 400-999/1000"}, Body(400, 1000, TOTAL, None)),
        # a server may send less than was asked for, or more; what it says counts
        (REST, {"content-range": "bytes 400-499/1000"}, Body(400, 500, TOTAL, '"v1"')),
        (Wanted(400, 500, TOTAL), {"content-range": "bytes 400-999/1000"}, Body(400, 1000, TOTAL, None)),
        # one that does not know the size does not contradict it
        (REST, {"content-range": "bytes 400-999/*"}, Body(400, 1000, TOTAL, '"v1"')),
    ],
)
def test_a_part_that_says_it_is_what_was_asked_for_is_used(
    wanted: Wanted, headers: dict[str, str], expected: Body
) -> None:
    assert judged(wanted, 206, headers) == expected


@pytest.mark.parametrize(
    "content_range",
    ["bytes 0-999/1000", "bytes 399-999/1000", "bytes 401-999/1000", "bytes 400-1000/1000", "bytes 400-399/1000"],
)  # fmt: skip
def test_a3_a_part_of_another_place_is_refused_and_asked_for_again(content_range: str) -> None:
    answer = judged(REST, 206, {"content-range": content_range})
    assert isinstance(answer, Retry)
    assert answer.reason.code == "source_unavailable"


@pytest.mark.parametrize("total", ["999", "1001", "0"])
def test_a3_a_part_of_a_file_of_another_size_is_a_mismatch(total: str) -> None:
    refused = refusal(REST, 206, {"content-range": f"bytes 400-998/{total}"})
    assert refused.code == "source_mismatch"
    assert refused.details == {"bytes_declared": 1000, "bytes_actual": int(total)}


@pytest.mark.parametrize(
    "content_range",
    [None, "", "bytes */1000", "400-999/1000", "bytes=400-999/1000", "bytes 400-999", "bytes ٤00-999/1000",
     "bytes 400-999/1000, bytes 400-999/1000", "items 400-999/1000", "bytes 4e2-999/1000", "bytes -400-999/1000",
     "bytes 400-99999999999999999999/1000"],
)  # fmt: skip
def test_a3_a_part_that_does_not_say_which_it_is_is_refused(content_range: str | None) -> None:
    headers = {} if content_range is None else {"content-range": content_range}
    assert isinstance(judged(REST, 206, headers), Retry)


@pytest.mark.parametrize("length", ["599", "601", "x", "-600", "600, 600", ""])
def test_a_length_that_contradicts_the_range_is_refused(length: str) -> None:
    assert isinstance(judged(REST, 206, PART | {"content-length": length}), Retry)


def test_several_parts_are_refused() -> None:
    headers = PART | {"content-type": "Multipart/Byteranges; boundary=x"}
    assert isinstance(judged(REST, 206, headers), Retry)


@pytest.mark.parametrize("status", [200, 206])
@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip", "aws-chunked"])
def test_a5_an_encoded_answer_is_refused(status: int, encoding: str) -> None:
    wanted, headers = (REST, PART) if status == 206 else (FIRST, {})
    answer = judged(wanted, status, headers | {"content-encoding": encoding})
    assert isinstance(answer, Retry)
    assert answer.reason.code == "source_unavailable"


def test_a2_the_whole_file_at_the_beginning_is_what_was_asked_for() -> None:
    expected = Body(0, TOTAL, TOTAL, '"v1"')
    assert judged(FIRST, 200, {"content-length": "1000", "etag": '"v1"'}) == expected
    assert judged(Wanted(0, 10, TOTAL), 200, {"etag": '"v1"'}) == expected


@pytest.mark.parametrize("headers", [{}, {"etag": '"v1"'}, {"etag": 'W/"v2"'}, {"content-length": "1000"}])
def test_a2_the_whole_file_instead_of_the_rest_begins_it_again(headers: dict[str, str]) -> None:
    answer = judged(REST, 200, headers)
    assert isinstance(answer, Restart)
    assert answer.reason.code == "range_unsupported"
    assert answer.body == Body(0, TOTAL, TOTAL, strong_etag(headers))


@pytest.mark.parametrize("wanted", [FIRST, REST])
@pytest.mark.parametrize("length", ["999", "1001", "0"])
def test_a_whole_file_of_another_size_is_a_mismatch(wanted: Wanted, length: str) -> None:
    refused = refusal(wanted, 200, {"content-length": length})
    assert refused.code == "source_mismatch"
    assert refused.details == {"bytes_declared": 1000, "bytes_actual": int(length)}


def test_a_length_that_is_no_number_is_refused() -> None:
    assert isinstance(judged(FIRST, 200, {"content-length": "1e3"}), Retry)


def test_a6_a_changed_strong_entity_tag_begins_the_file_again_and_says_so() -> None:
    part = judged(REST, 206, PART | {"etag": '"v2"'})
    whole = judged(REST, 200, {"etag": '"v2"'})
    assert isinstance(part, Restart)
    assert isinstance(whole, Restart)
    assert part.body is None  # it is asked for from 0
    assert whole.body == Body(0, TOTAL, TOTAL, '"v2"')  # it is from 0 already
    assert part.reason == whole.reason
    assert whole.reason.code == "source_changed"


@pytest.mark.parametrize(
    "etag", ['W/"v1"', 'W/"v2"', "v2", "", '"v2', '"a"b"', '"' + "x" * ETAG_CHARACTERS_MAX + '"']
)
def test_a6_a_weak_absent_or_malformed_entity_tag_is_no_reason_to(etag: str) -> None:
    assert judged(REST, 206, PART | {"etag": etag}) == Body(400, 1000, TOTAL, '"v1"')
    assert judged(UNTAGGED, 206, PART | {"etag": etag}) == Body(400, 1000, TOTAL, None)


def test_a6_with_nothing_durable_another_entity_tag_is_only_taken_over() -> None:
    tagged = Wanted(0, TOTAL, TOTAL, '"v1"')
    headers = {"content-range": "bytes 0-999/1000"}
    assert judged(tagged, 206, headers | {"etag": '"v2"'}) == Body(0, 1000, TOTAL, '"v2"')
    assert judged(tagged, 206, headers) == Body(0, 1000, TOTAL, None)


@pytest.mark.parametrize("headers", [{}, {"content-range": "bytes */400"}, {"content-range": "bytes */2000"}])
def test_a1_nothing_at_an_offset_below_the_declared_size_is_a_mismatch(headers: dict[str, str]) -> None:
    assert refusal(REST, 416, headers).code == "source_mismatch"


def test_a1_a_refused_range_of_a_file_of_the_right_size_is_asked_for_again() -> None:
    assert isinstance(judged(REST, 416, {"content-range": "bytes */1000"}), Retry)


@pytest.mark.parametrize("status", [401, 403, 404, 410, 451, 400, 304, 412, 204, 299, 302, 100])
def test_other_statuses_are_final_and_named(status: int) -> None:
    refused = refusal(REST, status, {"retry-after": "5"})
    assert refused.code == "source_unavailable"
    assert str(status) in refused.message
    assert refused.details == {"source_status": status}


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_passing_troubles_are_asked_about_again_when_the_source_wants(status: int) -> None:
    answer = judged(REST, status, {"retry-after": "17"})
    assert isinstance(answer, Retry)
    assert answer.reason.code == "source_unavailable"
    assert str(status) in answer.reason.message
    assert answer.after_seconds == 17


@given(
    st.integers(100, 599),
    st.dictionaries(
        st.sampled_from(
            ["content-range", "content-length", "content-encoding", "content-type", "etag", "retry-after",
             "ratelimit", "ratelimit-reset"]
        ),
        st.one_of(
            st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF), max_size=60),
            st.from_regex(r"bytes [0-9]{1,4}-[0-9]{1,4}/([0-9]{1,4}|\*)", fullmatch=True),
            st.sampled_from(["0", "400", "600", "1000", '"v1"', '"v2"', "identity"]),
        ),
    ),
)  # fmt: skip
def test_whatever_a_source_says_no_byte_is_used_at_the_wrong_place(
    status: int, headers: dict[str, str]
) -> None:
    answer: Answer | Refused
    try:
        answer = judged(REST, status, headers)
    except Refused as refused:
        answer = refused
    match answer:
        case Body(offset, end, total, _):
            assert (status, offset, total) == (206, 400, TOTAL)
            assert 400 < end <= TOTAL
        case Restart(reason, body):
            assert reason.code in ("source_changed", "range_unsupported")
            assert body is None or (status, body.offset, body.end) == (200, 0, TOTAL)
        case Retry(reason, after_seconds):
            assert reason.code == "source_unavailable"
            assert 0 <= after_seconds <= RETRY_AFTER_SECONDS_MAX
        case Refused(code):
            assert code in ("source_mismatch", "source_unavailable")
            assert code in CODES


# What came of a body.


def test_a4_a_body_that_ends_early_is_continued() -> None:
    body = Body(400, 1000, TOTAL)
    answer = check_ended(body, 999)
    assert isinstance(answer, Retry)
    assert answer.reason.code == "source_unavailable"
    assert check_ended(body, 1000) is None


def test_the_first_byte_past_the_declared_size_is_a_mismatch() -> None:
    body = Body(400, 1000, TOTAL)
    assert check_received(body, 1000) is None
    with pytest.raises(Refused) as refused:
        check_received(body, 1001)
    assert refused.value.code == "source_mismatch"


def test_the_first_byte_past_a_part_is_a_broken_answer() -> None:
    assert check_received(Body(400, 500, TOTAL), 500) is None
    assert isinstance(check_received(Body(400, 500, TOTAL), 501), Retry)


# When to ask again.


def date(seconds: float) -> str:
    return format_datetime(datetime.fromtimestamp(NOW + seconds, UTC), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 0),
        ({"retry-after": "0"}, 0),
        ({"retry-after": " 12 "}, 12),
        ({"retry-after": "99999"}, RETRY_AFTER_SECONDS_MAX),
        ({"retry-after": "9" * 400}, 0),
        ({"retry-after": "-5"}, 0),
        ({"retry-after": "1.5"}, 0),
        ({"retry-after": "soon"}, 0),
        ({"retry-after": date(90)}, 90),
        ({"retry-after": date(-90)}, 0),
        ({"retry-after": date(1e6)}, RETRY_AFTER_SECONDS_MAX),
        ({"retry-after": "Friday, 15-Jan-27 08:01:00 GMT"}, 60),
        ({"retry-after": "Fri Jan 15 08:01:00 2027"}, 60),
        ({"retry-after": "Fri, 99 Jan 2027 08:01:00 GMT"}, 0),
        ({"retry-after": "Fri, 15 Jan 99999 08:01:00 GMT"}, 0),
        ({"ratelimit": '"api";r=0;t=55'}, 55),
        ({"ratelimit": '"burst";r=0;t=5, "day";r=900;t=3600'}, 5),
        ({"ratelimit": '"burst";r=0;t=5,"hour";r=0;t=30'}, 30),
        ({"ratelimit": '"api";r=12;t=55'}, 0),
        ({"ratelimit": "limit=100, remaining=0, reset=30"}, 30),
        ({"ratelimit": "limit=100, remaining=3, reset=30"}, 0),
        ({"ratelimit": ";;,,=;t=x"}, 0),
        ({"ratelimit-reset": "44"}, 44),
        ({"ratelimit-reset": "1800000000"}, 0),  # a date in disguise: not what the field is defined as
        ({"retry-after": "7", "ratelimit": '"api";r=0;t=55', "ratelimit-reset": "60"}, 7),
        ({"retry-after": "soon", "ratelimit-reset": "60"}, 60),
    ],
)
def test_how_long_a_source_wants_to_be_left_alone(headers: dict[str, str], expected: float) -> None:
    assert wait_of(headers, now=NOW) == expected


@given(st.text(max_size=80))
def test_any_retry_after_is_bounded(text: str) -> None:
    headers = {"retry-after": text, "ratelimit": text, "ratelimit-reset": text}
    assert 0 <= wait_of(headers, now=NOW) <= RETRY_AFTER_SECONDS_MAX


def test_a8_attempts_are_bounded_and_the_last_one_says_why() -> None:
    for retry, code in ((UNAVAILABLE, "source_unavailable"), (STALLED, "stalled")):
        backoff = Backoff(3)
        for _ in range(2):
            backoff, _ = backoff.failed(retry, luck=0.5)
        with pytest.raises(Refused) as refused:
            backoff.failed(retry, luck=0.5)
        assert refused.value.code == code
        assert retry.reason.message in refused.value.message
        assert refused.value.details == {"attempts": 3}


def test_a8_the_code_at_the_end_is_that_of_the_last_failure() -> None:
    backoff, _ = Backoff(2).failed(STALLED, luck=0)
    with pytest.raises(Refused, match="source_unavailable"):
        backoff.failed(UNAVAILABLE, luck=0)
    backoff, _ = Backoff(2).failed(UNAVAILABLE, luck=0)
    with pytest.raises(Refused, match="stalled"):
        backoff.failed(STALLED, luck=0)


def test_a8_progress_begins_the_count_anew() -> None:
    backoff = Backoff(2)
    for _ in range(50):
        backoff, _ = backoff.failed(STALLED, luck=0)
        backoff = backoff.progressed()
    assert backoff == Backoff(2)


@pytest.mark.parametrize(
    ("count", "seconds", "least", "progress"),
    [
        (0, 0.1, 0, False),
        (0, 0.1, 1024, False),
        (1, 3600.0, 0, True),
        (1, 60.0, 1024, False),
        (1024 * 60, 60.0, 1024, True),
        (1024 * 60 - 1, 60.0, 1024, False),
        (2048, 0.5, 1024, True),
    ],
)
def test_a8_an_attempt_gets_on_when_it_brought_bytes_at_the_least_rate(
    count: int, seconds: float, least: int, progress: bool
) -> None:
    assert is_progress(count, seconds, least) is progress


def waits_until_too_slow(flow: Flow, pieces: Iterable[tuple[int, float]]) -> float | None:
    """For how long the source was waited for when it was found too slow, if it was."""
    waited = 0.0
    for count, seconds in pieces:
        flow, waited = flow.after(count, seconds), waited + seconds
        if flow.is_too_slow:
            return waited
    return None


def test_a8_a_source_that_sends_a_byte_now_and_then_is_too_slow() -> None:
    assert waits_until_too_slow(Flow(1024, 30.0), [(1, 7.0)] * 100) == 35.0
    assert waits_until_too_slow(Flow(1024, 30.0), [(1, 29.0)] * 100) == 58.0, "at most two windows"


def test_a8_bytes_of_an_earlier_window_do_not_pay_for_a_later_one() -> None:
    quick = [(1 << 30, 1.0)] * 30
    assert waits_until_too_slow(Flow(1024, 30.0), [*quick, *[(100, 1.0)] * 100]) == 60.0


@pytest.mark.parametrize("pieces", [[(1024, 1.0)] * 1000, [(30_000, 29.0)] * 100, [(1, 0.0)] * 1000])
def test_a8_a_source_at_the_least_rate_is_waited_for(pieces: list[tuple[int, float]]) -> None:
    """Pieces that were there already, as those are that a slow disk holds back, are never too slow."""
    assert waits_until_too_slow(Flow(1024, 30.0), pieces) is None


def test_a8_without_a_least_rate_no_source_is_too_slow() -> None:
    assert waits_until_too_slow(Flow(0, 30.0), [(1, 29.0)] * 1000) is None


def test_the_wait_is_a_share_of_a_window_that_doubles_up_to_a_bound() -> None:
    backoff, windows = Backoff(1000), []
    for _ in range(900):
        backoff, seconds = backoff.failed(UNAVAILABLE, luck=1.0)
        windows.append(seconds)
    assert windows[:4] == [BACKOFF_SECONDS_FIRST * n for n in (1, 2, 4, 8)]
    assert all(a <= b for a, b in pairwise(windows))
    assert windows[-1] == BACKOFF_SECONDS_MAX
    assert backoff.failed(UNAVAILABLE, luck=0.0)[1] == 0
    assert backoff.failed(UNAVAILABLE, luck=0.25)[1] == BACKOFF_SECONDS_MAX / 4


def test_what_the_source_asks_for_is_waited_in_full() -> None:
    asked = Retry(UNAVAILABLE.reason, 20.0)
    assert Backoff(3).failed(asked, luck=0.0)[1] == 20
    assert Backoff(3).failed(asked, luck=1.0)[1] == 20 + BACKOFF_SECONDS_FIRST


@pytest.mark.parametrize("code", ["range_unsupported", "source_changed"])
def test_a2_a6_a_source_that_never_continues_is_left_though_bytes_came_each_time(code: str) -> None:
    restart = Restart(Reason(code, "The file begins again at 0."))
    backoff = Backoff(3)
    for _ in range(RESTARTS_MAX):
        backoff = backoff.restarted(restart).progressed()
    with pytest.raises(Refused) as refused:
        backoff.restarted(restart)
    assert refused.value.code == code
    assert refused.value.details == {"restarts": RESTARTS_MAX}
