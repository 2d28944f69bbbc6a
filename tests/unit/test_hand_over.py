"""An engine is handed its model before it is asked anything: patiently while it starts, and not for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from ficc.controller.reconcilers import readiness
from ficc.controller.reconcilers.readiness import REFUSALS_MAX, ReadinessFailed, hand_over
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence

FENCE = Fence("0" * 26, 1, "0" * 64)
STARTING = Refused("service_not_ready", "The engine takes no connection.")
BUSY = Refused("busy", "Inputs are being uploaded already.")
REFUSED = Refused("engine_error", "The engine answered 507: no space left.")


class Link:
    """Answers each upload with the next of these."""

    def __init__(self, *answers: Refused | None) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    async def upload(
        self,
        fence: Fence,
        model: str,
        input_ids: Sequence[str],
        deadline_seconds: float,
        on_progress: Callable[[Mapping[str, Any]], None],
    ) -> None:
        assert (fence, deadline_seconds) == (FENCE, readiness.UPLOAD_SECONDS)
        self.asked.append((model, tuple(input_ids)))
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        on_progress({"input": "model-0", "bytes_sent": 1_000_000, "bytes": 4_000_000})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "PAUSE_SECONDS", 0.0)


async def hand(link: Link) -> list[str]:
    said: list[str] = []
    await hand_over(link, FENCE, "assistant", ["model-0"], said.append)  # type: ignore[arg-type]
    return said


async def test_it_is_handed_over_once_the_engine_listens() -> None:
    link = Link(STARTING, STARTING, BUSY, REFUSED, None)
    (said,) = await hand(link)
    assert said == "The engine is handed its model: 1.0 MB of 4.0 MB (model-0)."
    assert link.asked == [("assistant", ("model-0",))] * 5


async def test_an_engine_that_refuses_it_a_few_times_is_unfit() -> None:
    link = Link(*[STARTING] * 5, *[REFUSED] * 9)
    with pytest.raises(ReadinessFailed, match="no space left"):
        await hand(link)
    assert len(link.asked) == 5 + REFUSALS_MAX


@pytest.mark.parametrize(
    "code", ["fenced", "service_stopped", "peer_lost", "executor_unavailable", "not_found"]
)
async def test_what_is_no_fault_of_the_engine_is_handed_on(code: str) -> None:
    with pytest.raises(Refused, match=code):
        await hand(Link(Refused(code, ".")))
