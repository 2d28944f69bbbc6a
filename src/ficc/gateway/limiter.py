"""What each credential and each project has asked for in this gateway, held against their allowances.

Every controller counts for itself: behind several, as much may be asked for at each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ficc.domain import limits
from ficc.domain.access import Actor
from ficc.domain.errors import Refused
from ficc.domain.limits import Allowance, Spent
from ficc.gateway.ports import Headers

ACCOUNTS_BEFORE_PURGE = 1024
_WORDS = {
    "requests_per_minute": "may send {} requests a minute",
    "tokens_per_minute": "may use {} tokens a minute",
    "concurrency": "may have {} requests open at once",
}
Key = tuple[str, str]


@dataclass(slots=True)
class Account:
    whose: str
    allowance: Allowance
    spent: Spent


class Limiter:
    def __init__(self, project: Allowance) -> None:
        self._project = project
        self._accounts: dict[Key, Account] = {}
        self._purge_at = ACCOUNTS_BEFORE_PURGE

    def applies(self, actor: Actor) -> bool:
        return bool(actor.allowance) or bool(self._project)

    def enter(self, actor: Actor, now: float) -> Permit:
        """The permit of one request; whoever has it gives it back. Raises Refused `rate_limited`."""
        accounts = list(self._of(actor, now))
        for account in accounts:
            excess = limits.excess(account.spent, account.allowance)
            if excess is not None:
                most = getattr(account.allowance, excess.limit)
                seconds = max(1, math.ceil(excess.wait_seconds))
                raise Refused(
                    "rate_limited",
                    f"This {account.whose} {_WORDS[excess.limit].format(most)}; try again in {seconds} s.",
                    retry_after_seconds=seconds,
                )
        for account in accounts:
            account.spent = limits.begun(account.spent)
        return Permit(accounts)

    def headers(self, actor: Actor, now: float) -> Headers:
        """What is left, as OpenAI's headers say it: of the account that has the least left."""
        found: Headers = []
        accounts = list(self._of(actor, now))
        for what in ("requests", "tokens"):
            left = [
                limits.left(getattr(one.spent, what), per_minute)
                for one in accounts
                if (per_minute := getattr(one.allowance, f"{what}_per_minute"))
            ]
            if left:
                least = min(left, key=lambda one: one.remaining)
                name = what.encode()
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % least.limit),
                    (b"x-ratelimit-remaining-" + name, b"%d" % least.remaining),
                    (b"x-ratelimit-reset-" + name, b"%.3fs" % least.reset_seconds),
                ]
        return found

    def _of(self, actor: Actor, now: float) -> Iterator[Account]:
        """The accounts that count, at this moment."""
        if actor.allowance:
            yield self._account(("credential", actor.authority_id), "credential", actor.allowance, now)
        if self._project:
            yield self._account(("project", actor.project_id), "project", self._project, now)

    def _account(self, key: Key, whose: str, allowance: Allowance, now: float) -> Account:
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= self._purge_at:
                self._purge(now)
            account = self._accounts[key] = Account(whose, allowance, Spent(at=now))
        account.allowance = allowance
        account.spent = limits.leaked(account.spent, allowance, now)
        return account

    def _purge(self, now: float) -> None:
        """Forget those of whom nothing is left."""
        for key, account in list(self._accounts.items()):
            if limits.leaked(account.spent, account.allowance, now).nothing:
                del self._accounts[key]
        self._purge_at = max(ACCOUNTS_BEFORE_PURGE, 2 * len(self._accounts))


class Permit:
    """One request's, with every account that it counts in."""

    def __init__(self, accounts: list[Account]) -> None:
        self._accounts = accounts

    def leave(self, tokens: int, now: float, *, refused: bool) -> None:
        """The request has ended, and took these tokens; refused, it cost nothing."""
        for account in self._accounts:
            settled = limits.leaked(account.spent, account.allowance, now)
            account.spent = limits.ended(settled, tokens, refused=refused)
