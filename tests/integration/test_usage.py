"""Usage over HTTP, on either database: what callers who were refused left behind, as pages, sums and CSV."""

from __future__ import annotations

import csv
import io
import time
from typing import Any

import pytest

from support.http import Http, http_of
from support.installation import Installation

NOBODY = "01arz3ndektsv4rrffq69g5fav"
PATH = f"/inference/{NOBODY}/v1/chat/completions"
FORMULA = "=HYPERLINK(1)"
PATIENCE_SECONDS = 10.0


@pytest.fixture
def http(either: Installation) -> Http:
    """Of a caller of its own, who asked three times for a service that there is not."""
    owner = http_of(either)
    wanted = {
        "label": f"metered {time.time()}",
        "scopes": ["inference:invoke", "inference:read", "tokens:manage"],
    }
    caller = http_of(either, owner("POST", "/tokens", wanted).ok(201)["token"])
    for request_id in (FORMULA, "second", "third"):
        assert caller("POST", PATH, {}, headers={"x-request-id": request_id}).code == "not_found"
    return caller


def mine(http: Http) -> str:
    return str(http("GET", "/session").ok()["session_id"])


def records(http: Http, count: int = 3, **query: str) -> list[dict[str, Any]]:
    """The caller's, once there are so many."""
    me, until = mine(http), time.monotonic() + PATIENCE_SECONDS
    while True:
        found = [
            r for r in http("GET", "/usage", limit="200", **query).ok()["items"] if r["credential_id"] == me
        ]
        if len(found) >= count:
            return found
        assert time.monotonic() < until, found
        time.sleep(0.05)


def test_each_request_is_a_record_newest_first(http: Http) -> None:
    found = records(http)
    assert [record["request_id"] for record in found] == ["third", "second", FORMULA]
    first = found[-1]
    assert (first["outcome"], first["code"], first["status"]) == ("refused", "not_found", 404)
    assert (first["tokens"], first["prompt_tokens"], first["completion_tokens"]) == ("none", 0, 0)
    assert (first["service_id"], first["first_byte_ms"], first["attempt_id"]) == (None, None, None)
    assert first["path"] == "/v1/chat/completions"
    assert first["credential"] == "token"


def test_pages_follow_one_another(http: Http) -> None:
    whole = records(http)
    first = http("GET", "/usage", limit="1").ok()
    second = http("GET", "/usage", limit="1", after=first["next"]).ok()
    assert [first["items"][0]["id"], second["items"][0]["id"]] == [whole[0]["id"], whole[1]["id"]]


def test_a_span_of_time(http: Http) -> None:
    newest = records(http)[0]
    assert records(http, 1, **{"from": newest["started_at"]})[-1]["id"] == newest["id"]
    assert http("GET", "/usage", to="2001-01-01").ok()["items"] == []


@pytest.mark.parametrize("by", ["day", "token", "service"])
def test_sums_agree_with_the_records(http: Http, by: str) -> None:
    records(http)
    sums = http("GET", "/usage", group_by=by).ok()
    assert sums["next"] is None
    if by == "token":
        (own,) = [one for one in sums["items"] if one["credential_id"] == mine(http)]
        assert (own["requests"], own["refused"], own["uncounted_requests"]) == (3, 3, 0)
        assert own["label"].startswith("metered")
    else:
        assert sum(one["refused"] for one in sums["items"]) >= 3
    table = http("GET", "/usage", group_by=by, format="csv").body.decode()
    assert len(list(csv.DictReader(io.StringIO(table)))) == len(sums["items"])


@pytest.mark.parametrize("how", [{"format": "csv"}, {}], ids=["format", "accept"])
def test_csv_holds_every_record_and_no_formula(http: Http, how: dict[str, str]) -> None:
    found = records(http)
    headers = {} if how else {"accept": "text/csv"}
    answer = http("GET", "/usage", headers=headers, **how)
    assert answer.headers["content-type"].startswith("text/csv")
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(answer.body.decode()))}
    for record in found:
        row = rows[record["id"]]
        assert set(row) == set(record)
        expected = f"'{FORMULA}" if record["request_id"] == FORMULA else record["request_id"]
        assert (row["request_id"], row["code"], row["service_id"]) == (expected, "not_found", "")
        assert row["prompt_tokens"] == "0"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"from": "yesterday"}, "from"),
        ({"to": "2026-01-01T00:00:00"}, "to"),
        ({"from": "2026-01-02", "to": "2026-01-01"}, "from"),
        ({"from": "1999-01-01", "group_by": "day"}, "from"),
        ({"group_by": "week"}, "group_by"),
        ({"group_by": "day", "after": NOBODY}, "after"),
        ({"format": "xml"}, "format"),
        ({"since": "2026-01-01"}, "since"),
    ],
)
def test_a_question_that_cannot_be_answered_names_what_is_wrong(
    http: Http, query: dict[str, str], param: str
) -> None:
    answer = http("GET", "/usage", **query)
    assert (answer.code, answer.param) == ("invalid_request", param)


def test_who_may_ask(either: Installation, http: Http) -> None:
    wanted = {"label": "reads models", "scopes": ["models:read"]}
    other = http_of(either, http_of(either)("POST", "/tokens", wanted).ok(201)["token"])
    answer = other("GET", "/usage")
    assert (answer.code, answer.param) == ("denied", "inference:read")
    assert http("GET", f"/inference/{NOBODY}/usage").code == "not_found"
