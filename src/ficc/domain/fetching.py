"""The decisions of a download: what to ask a source for, what its answer is good for, when to ask again.

Bytes are asked for in ranges that begin at the durable offset, so an interruption costs what was in flight
and no more. An answer is used only where it says itself that it is those bytes: a server that ignores ranges,
encodes, shifts, or meanwhile serves another file never adds a byte at the wrong place. Whether the bytes are
the right ones is for their hash to say; what is decided here keeps wrong ones from costing a whole download.

HTTP's terms are those of RFC 9110: ranges and Content-Range in section 14, ETag in 8.8.3, If-Range in 13.1.5,
Retry-After in 10.2.3. Header names are lower-case throughout; fields that came twice are joined by a comma.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NoReturn

from ficc.domain.errors import Reason, Refused

RETRY_AFTER_SECONDS_MAX = 300.0
"""The longest that a source can make us wait; whoever asks for more is asked again earlier."""
BACKOFF_SECONDS_FIRST = 0.5
BACKOFF_SECONDS_MAX = 60.0
RESTARTS_MAX = 4
"""How often one file begins again at 0 because its source does not continue it."""
ETAG_CHARACTERS_MAX = 256

RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses after which the same request may do better; every other error is final."""

_CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,19})-(?P<last>\d{1,19})/(?P<total>\d{1,19}|\*)", re.ASCII)
_UNSATISFIED = re.compile(r"bytes \*/(?P<total>\d{1,19})", re.ASCII)
_LENGTH = re.compile(r"\d{1,19}", re.ASCII)
_SECONDS = re.compile(r"\d{1,9}", re.ASCII)
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e]*"')


# What to ask for.


@dataclass(frozen=True, slots=True)
class Wanted:
    """The bytes from `offset` up to, not including, `end` of a file of `total` bytes; at least one of them.

    `etag` is the strong entity tag of the answer that the bytes before `offset` came from, quotes included.
    """

    offset: int
    end: int
    total: int
    etag: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.offset < self.end <= self.total:
            raise ValueError(f"bytes {self.offset} to {self.end} of {self.total}")

    @property
    def headers(self) -> dict[str, str]:
        """The request headers that say so. A body in its plain form is asked for, since an offset in an
        encoded one means nothing."""
        headers = {"range": f"bytes={self.offset}-{self.end - 1}", "accept-encoding": "identity"}
        if self.etag is not None and self.offset > 0:
            headers["if-range"] = self.etag
        return headers


def next_range(offset: int, total: int, range_bytes: int, etag: str | None = None) -> Wanted | None:
    """What to ask for when `offset` bytes are durable; None when all of them are: no request is made then."""
    if offset == total:
        return None
    return Wanted(offset, min(total, offset + range_bytes), total, etag)


# What an answer is good for.


@dataclass(frozen=True, slots=True)
class Body:
    """The body is the file's bytes from `offset` up to, not including, `end`.

    `end` is what the answer says, which may be less or more than what was asked for. `etag` is the strong
    entity tag to ask for the rest with, if there is one.
    """

    offset: int
    end: int
    total: int
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """What is durable cannot be continued: the file begins again at 0, and the reason is told.

    `body`, where there is one, is the file from 0: the answer in hand is used after the truncation. Without
    one it is left, and the file is asked for from 0 without an entity tag.
    """

    reason: Reason
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt brought nothing, or broke; another one may do better. `reason.code` is `source_unavailable`
    or `stalled`; `after_seconds` is how long the source wants to be left alone, bounded."""

    reason: Reason
    after_seconds: float = 0.0


Answer = Body | Restart | Retry


def check_answer(wanted: Wanted, status: int, headers: Mapping[str, str], *, now: float) -> Answer:
    """What the answer to a request for `wanted` is good for. `now` is in seconds since 1970.

    Raises Refused where asking again cannot help: `source_mismatch` when the source's file has another size
    than declared, `source_unavailable` when the source will not serve it.
    """
    if status == 206:
        return _check_part(wanted, headers)
    if status == 200:
        return _check_whole(wanted, headers)
    if status == 416:
        return _check_unsatisfied(wanted, headers)
    if status in RETRYABLE:
        return Retry(_unavailable(f"The source answers with status {status}."), wait_of(headers, now=now))
    why = " (it wants a credential, or gives access to nobody)" if status in (401, 403) else ""
    raise Refused(
        "source_unavailable",
        f"The source answers with status {status}{why}; correct the address or the access, then acquire again.",
        details={"source_status": status},
    )


def _check_part(wanted: Wanted, headers: Mapping[str, str]) -> Answer:
    unusable = _unusable(headers)
    if unusable:
        return unusable
    found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if found is None:
        return Retry(_unavailable("The source sends a part and does not say which (no valid Content-Range)."))
    first, end = int(found["first"]), int(found["last"]) + 1
    if found["total"] != "*" and int(found["total"]) != wanted.total:
        _other_size(int(found["total"]), wanted.total)
    if first != wanted.offset or not first < end <= wanted.total:
        return Retry(
            _unavailable(
                f"The source sends bytes {first} to {end - 1}, though {wanted.offset} to {wanted.end - 1} "
                "were asked for."
            )
        )
    length = headers.get("content-length")
    if length is not None and (not _LENGTH.fullmatch(length) or int(length) != end - first):
        return Retry(_unavailable("The source's Content-Range and Content-Length contradict each other."))
    etag = strong_etag(headers)
    if _changed(wanted, etag):
        return Restart(CHANGED)
    # A part need not repeat the entity tag that it was asked for under.
    return Body(first, end, wanted.total, etag or (wanted.etag if wanted.offset > 0 else None))


def _check_whole(wanted: Wanted, headers: Mapping[str, str]) -> Answer:
    """The whole file, though a part was asked for: a server may ignore ranges, and ignores them for a file
    that is not the one If-Range names."""
    unusable = _unusable(headers)
    if unusable:
        return unusable
    length = headers.get("content-length")
    if length is not None:
        if not _LENGTH.fullmatch(length):
            return Retry(_unavailable("The source's Content-Length is no number."))
        if int(length) != wanted.total:
            _other_size(int(length), wanted.total)
    etag = strong_etag(headers)
    body = Body(0, wanted.total, wanted.total, etag)
    if wanted.offset == 0:
        return body
    return Restart(CHANGED if _changed(wanted, etag) else RANGES_IGNORED, body)


def _check_unsatisfied(wanted: Wanted, headers: Mapping[str, str]) -> Retry:
    """416: the source has nothing at an offset that is below the declared size."""
    found = _UNSATISFIED.fullmatch(headers.get("content-range", ""))
    if found is None:
        raise Refused(
            "source_mismatch",
            f"The source has no bytes at offset {wanted.offset}, though the manifest declares {wanted.total}.",
            details={"bytes_declared": wanted.total},
        )
    if int(found["total"]) != wanted.total:
        _other_size(int(found["total"]), wanted.total)
    return Retry(
        _unavailable(f"The source refuses bytes {wanted.offset} to {wanted.end - 1} of its own file.")
    )


def _unusable(headers: Mapping[str, str]) -> Retry | None:
    """Bodies in which offsets mean nothing to us, whatever else the answer says."""
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        return Retry(_unavailable("The source sends the file encoded, though its plain form was asked for."))
    if headers.get("content-type", "").strip().lower().startswith("multipart/byteranges"):
        return Retry(_unavailable("The source sends several parts, though one was asked for."))
    return None


def _other_size(actual: int, declared: int) -> NoReturn:
    raise Refused(
        "source_mismatch",
        f"The source's file has {actual} bytes, but the manifest declares {declared}; register the model anew with "
        "what the source has, or with another source.",
        details={"bytes_declared": declared, "bytes_actual": actual},
    )


def _changed(wanted: Wanted, etag: str | None) -> bool:
    """Whether what is durable came from another file. Without two strong entity tags nobody can tell, and
    with nothing durable it does not matter."""
    return wanted.offset > 0 and wanted.etag is not None and etag is not None and etag != wanted.etag


def strong_etag(headers: Mapping[str, str]) -> str | None:
    """The entity tag, if it is one that promises the same bytes. It comes back in If-Range and is stored, so
    one that is malformed or long counts as absent."""
    etag = headers.get("etag", "").strip()
    return etag if len(etag) <= ETAG_CHARACTERS_MAX and _STRONG_ETAG.fullmatch(etag) else None


CHANGED = Reason(
    "source_changed",
    "The source serves another file than at the start (its entity tag changed); the file begins again at 0.",
)
RANGES_IGNORED = Reason(
    "range_unsupported",
    "The source sends the whole file where the rest was asked for; the file begins again at 0.",
)


def _unavailable(message: str) -> Reason:
    return Reason("source_unavailable", message)


# What has come of a body.


def check_received(body: Body, at: int) -> Retry | None:
    """Whether the body may stand at `at`, the position after the last byte that arrived; before that byte is
    written. None while it does not go past the body's end.

    Raises Refused `source_mismatch` for a file that goes on after its declared size.
    """
    if at <= body.end:
        return None
    if body.end == body.total:
        raise Refused(
            "source_mismatch",
            f"The source sends more than the {body.total} bytes that the manifest declares.",
            details={"bytes_declared": body.total},
        )
    return Retry(_unavailable(f"The source sends more than the part that ends at {body.end}."))


def check_ended(body: Body, at: int) -> Retry | None:
    """What it means that the body ended at `at`: None when it was all of it."""
    if at >= body.end:
        return None
    return Retry(_unavailable(f"The source ended the answer at {at}, before its end at {body.end}."))


# How fast it has to come.


@dataclass(frozen=True, slots=True)
class Flow:
    """What a source sends while it is waited for, held against the least rate that is borne.

    The rate is that of a window: of `window_seconds` of waiting, and of the wait that ends it. What did not
    have to be waited for costs no time, so a reader that is slow itself never finds its source slow. A
    `bytes_per_second_min` of 0 bears any rate.
    """

    bytes_per_second_min: int
    window_seconds: float
    seconds: float = 0.0
    count: int = 0

    def after(self, count: int, seconds: float) -> Flow:
        """After `count` bytes for which the source was waited for so long."""
        if self.seconds >= self.window_seconds:
            return replace(self, seconds=seconds, count=count)
        return replace(self, seconds=self.seconds + seconds, count=self.count + count)

    @property
    def is_too_slow(self) -> bool:
        return self.seconds >= self.window_seconds and self.count < self.bytes_per_second_min * self.seconds


def is_progress(count: int, seconds: float, bytes_per_second_min: int) -> bool:
    """Whether an attempt that made `count` bytes durable in so many seconds got on. One that was given up for
    its silence or its rate did not, as long as what it had brought before does not make up for it."""
    return count > 0 and count >= bytes_per_second_min * seconds


# When to ask again.


def wait_of(headers: Mapping[str, str], *, now: float) -> float:
    """How long the source wants to be left alone: by Retry-After, else by the rate-limit fields; bounded."""
    for seconds in (
        _retry_after(headers.get("retry-after", "").strip(), now),
        _rate_limit(headers.get("ratelimit", "")),
        _seconds(headers.get("ratelimit-reset", "").strip()),
    ):
        if seconds is not None:
            return min(max(seconds, 0.0), RETRY_AFTER_SECONDS_MAX)
    return 0.0


def _seconds(text: str) -> float | None:
    return float(text) if _SECONDS.fullmatch(text) else None


def _retry_after(text: str, now: float) -> float | None:
    """Seconds, or a date in any of the three forms of HTTP."""
    seconds = _seconds(text)
    if seconds is not None or not text:
        return seconds
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError):
        return None


def _rate_limit(text: str) -> float | None:
    """The wait of the limits that are used up, of `"name";r=0;t=30, …` (draft-ietf-httpapi-ratelimit-headers
    since 08) or of `limit=10, remaining=0, reset=30` (before)."""
    waits: list[float] = []
    limits = text.split(",") if ";" in text else [text.replace(",", ";")]
    for limit in limits:
        members = dict(member.strip().partition("=")[::2] for member in limit.split(";"))
        wait = _seconds(members.get("t", members.get("reset", "")))
        if wait is not None and members.get("r", members.get("remaining", "0")) == "0":
            waits.append(wait)
    return max(waits, default=None)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How patient the download of one file still is.

    `failures` counts attempts since the last one that got on. `restarts` counts how often the file
    began again at 0, over the whole download: every restart is followed by progress, which would otherwise
    let a source that never continues be asked for ever.
    """

    attempts_max: int
    failures: int = 0
    restarts: int = 0

    def progressed(self) -> Backoff:
        """An attempt got on."""
        return replace(self, failures=0) if self.failures else self

    def failed(self, retry: Retry, *, luck: float) -> tuple[Backoff, float]:
        """What is left after a failed attempt, and the seconds until the next: what the source asked for, and
        on top a share `luck` (evenly from 0 to 1) of a window that doubles, so that those who failed together
        do not come back together.

        Raises Refused when it was the last attempt: `stalled` if the source fell silent in it, else
        `source_unavailable`.
        """
        failures = self.failures + 1
        if failures >= self.attempts_max:
            raise Refused(
                retry.reason.code,
                f"{retry.reason.message} Attempts that brought nothing, or too little: {failures}. What is durable "
                "stays; acquiring again continues from there.",
                details={"attempts": failures},
            )
        doublings = min(failures - 1, 30)  # far past the cap, far below what overflows
        window = min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_FIRST * 2**doublings)
        return replace(self, failures=failures), retry.after_seconds + luck * window

    def restarted(self, restart: Restart) -> Backoff:
        """What is left after the file began again at 0.

        Raises Refused when it did so too often: `source_changed` or `range_unsupported`, as the last reason.
        """
        if self.restarts >= RESTARTS_MAX:
            what = (
                "serves another file each time"
                if restart.reason.code == CHANGED.code
                else "cannot send a file from the middle, and never got through from its beginning"
            )
            raise Refused(
                restart.reason.code,
                f"The source {what}; the file began again {self.restarts} times. Acquire again later, or use "
                "another source.",
                details={"restarts": self.restarts},
            )
        return replace(self, restarts=self.restarts + 1)
