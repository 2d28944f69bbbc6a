"""Who may do what: scopes, and what is left of a token's grant under its subject's membership."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ficc.domain.errors import Refused, invalid
from ficc.domain.limits import UNLIMITED, Allowance

Kind = Literal["session", "token", "service_token", "setting"]
"""What a caller showed; or a setting of the installation, which acts for who made it."""

SCOPES: tuple[str, ...] = (
    "models:read",
    "models:manage",
    "inference:read",
    "inference:manage",
    "inference:invoke",
    "jobs:read",
    "jobs:execute",
    "jobs:cancel",
    "jobs:logs",
    "contributors:read",
    "contributors:manage",
    "tokens:manage",
    "audit:read",
    "identities:manage",
)


@dataclass(frozen=True, slots=True)
class Actor:
    """An authenticated caller with the scopes that hold now. `service_id` is set for a service token,
    which can only invoke that one service. `authority_id` is what is looked up again during a long
    response. `allowance` is how much inference it may ask for."""

    kind: Kind
    authority_id: str
    subject_id: str
    project_id: str
    scopes: frozenset[str]
    service_id: str | None = None
    allowance: Allowance = UNLIMITED

    def require(self, *scopes: str) -> None:
        """Raises Refused `denied` naming the first missing scope in `param`."""
        for scope in scopes:
            if scope not in self.scopes:
                raise Refused("denied", f"This needs the scope {scope}; use a credential that has it.", scope)


def effective(granted: Iterable[str], membership: Iterable[str]) -> frozenset[str]:
    """The scopes of a token: what it was granted and its subject still has."""
    return frozenset(granted) & frozenset(membership)


def check_scopes(scopes: Iterable[str], param: str) -> tuple[str, ...]:
    """The scopes in their usual order, each once. Raises Refused for an unknown one."""
    wanted = set(scopes)
    unknown = sorted(wanted - set(SCOPES))
    if unknown:
        raise invalid(f"{unknown[0]!r} is no scope; the scopes are {', '.join(SCOPES)}.", param)
    return tuple(scope for scope in SCOPES if scope in wanted)
