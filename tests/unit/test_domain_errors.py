"""Refusals as values."""

from __future__ import annotations

from ficc.domain.errors import Reason, Refused, invalid


def test_a_refusal_reads_as_its_code_and_message() -> None:
    refused = Refused("queue_full", "Try again later.", retry_after_seconds=1)
    assert str(refused) == "queue_full: Try again later."
    assert refused.reason == Reason("queue_full", "Try again later.")
    assert refused.reason.as_json() == {"code": "queue_full", "message": "Try again later."}


def test_two_refusals_are_never_equal_and_can_be_kept_in_sets() -> None:
    one, other = Refused("busy", "."), Refused("busy", ".")
    assert one != other
    assert len({one, other, one}) == 2


def test_details_are_not_shared_between_refusals() -> None:
    assert Refused("busy", ".").details is not Refused("busy", ".").details


def test_invalid_names_the_field() -> None:
    refused = invalid("bytes is an integer.", "files[0].bytes")
    assert (refused.code, refused.param) == ("invalid_request", "files[0].bytes")
