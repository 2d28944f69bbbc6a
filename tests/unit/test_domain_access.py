"""Scopes: what is left of a grant, and what a caller may do with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ficc.domain.access import SCOPES, Actor, check_scopes, effective
from ficc.domain.errors import Refused

SOME = st.sets(st.sampled_from(SCOPES))


def actor(*scopes: str) -> Actor:
    return Actor("token", "authority", "subject", "project", frozenset(scopes))


@given(SOME, SOME)
def test_a_token_never_has_more_than_its_subject(granted: set[str], membership: set[str]) -> None:
    assert effective(granted, membership) == granted & membership


def test_the_first_missing_scope_is_named() -> None:
    actor("models:read", "models:manage").require("models:read", "models:manage")
    actor().require()
    with pytest.raises(Refused) as caught:
        actor("models:read").require("models:read", "jobs:execute", "tokens:manage")
    assert (caught.value.code, caught.value.param) == ("denied", "jobs:execute")


def test_no_scope_implies_another() -> None:
    with pytest.raises(Refused):
        actor("models:manage").require("models:read")


@given(st.lists(st.sampled_from(SCOPES)))
def test_scopes_are_kept_once_in_their_usual_order(scopes: list[str]) -> None:
    checked = check_scopes(scopes, "scopes")
    assert set(checked) == set(scopes)
    assert list(checked) == [scope for scope in SCOPES if scope in checked]


@pytest.mark.parametrize("scope", ["models:write", "", "MODELS:READ", "models:read "])
def test_an_unknown_scope_is_refused_by_name(scope: str) -> None:
    with pytest.raises(Refused) as caught:
        check_scopes(["models:read", scope], "scopes")
    assert (caught.value.code, caught.value.param) == ("invalid_request", "scopes")
    assert repr(scope) in caught.value.message


def test_the_scopes_are_the_interfaces() -> None:
    assert set(SCOPES) == {
        *("models:read", "models:manage", "inference:read", "inference:manage", "inference:invoke"),
        *("jobs:read", "jobs:execute", "jobs:cancel", "jobs:logs"),
        *("contributors:read", "contributors:manage", "tokens:manage", "audit:read", "identities:manage"),
    }
