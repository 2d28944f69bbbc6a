"""What an attempt leaves, over the executor's socket: kept beyond its sandbox, read in parts, and dropped."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ficc.client.executor import fence_document
from ficc.domain.errors import Refused
from ficc.domain.plan import Fence
from support.executor import ExecutorProcess, Session, connected

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

SLEEP = "import time; time.sleep(600)"


@pytest.fixture(scope="module")
def executor() -> Iterator[ExecutorProcess]:
    with ExecutorProcess.on_new_directory() as made:
        yield made


@pytest.fixture
async def session(executor: ExecutorProcess) -> AsyncIterator[Session]:
    async with connected(executor) as made:
        yield made


async def part(session: Session, fence: Fence, **wanted: Any) -> tuple[bytes, int, bool]:
    """The bytes, how many there are altogether, and whether more were written."""
    answer = await session.act("output", fence, **{"offset": 0, "limit": 1 << 20, **wanted})
    return base64.b64decode(answer["data"]), answer["bytes_total"], answer["truncated"]


async def test_what_a_plan_names_is_kept_beyond_its_sandbox(
    session: Session, executor: ExecutorProcess
) -> None:
    script = "open('/run/ficc/out', 'w').write('0123456789'); open('/run/ficc/other', 'w').write('x')"
    fence = await session.run(session.plan(script, outputs=["out"]))
    await session.until(fence, "released")
    assert await part(session, fence, name="out", offset=4, limit=3) == (b"456", 10, False)
    for name in ("other", "../out", "", "index.json", "0"):
        with pytest.raises(Refused) as refused:
            await part(session, fence, name=name)
        assert refused.value.code == "not_found"
    (directory,) = (executor.state / "outputs").glob(fence.attempt_id)
    assert directory.stat().st_mode & 0o077 == 0
    await session.control.call("discard", fence=fence_document(fence))
    assert not directory.exists()
    assert await session.output(fence) == ""


@pytest.mark.parametrize(
    "wanted", [{"offset": -1}, {"limit": 0}, {"limit": (1 << 20) + 1}, {"limit": None}], ids=str
)
async def test_a_part_is_bounded(session: Session, wanted: dict[str, Any]) -> None:
    fence = await session.run(session.plan("pass", outputs=["out"]))
    await session.until(fence, "released")
    with pytest.raises(Refused) as refused:
        await part(session, fence, name="out", **wanted)
    assert refused.value.code == "invalid_request"


async def test_nothing_of_an_attempt_that_goes_on_is_dropped_or_read_as_an_output(session: Session) -> None:
    fence = await session.run(session.plan(SLEEP, outputs=["out"]))
    await session.until(fence, "running")
    with pytest.raises(Refused) as refused:
        await part(session, fence, name="out")
    assert refused.value.code == "action_not_allowed"
    with pytest.raises(Refused) as refused:
        await session.control.call("discard", fence=fence_document(fence))
    assert refused.value.code == "attempt_not_released"
    stranger = replace(fence, generation=7)
    for operation in ("output", "discard"):
        with pytest.raises(Refused) as refused:
            await session.act(operation, stranger, offset=0, limit=1)
        assert refused.value.code == "fenced"
    await session.stop(fence, 0)
    await session.until(fence, "released")


async def test_a_sensitive_plans_end_quotes_no_output(session: Session) -> None:
    script = "raise SystemExit('the secret')"
    open_end = await session.finished(session.plan(script))
    assert "the secret" in open_end["reason"]["message"]
    plan = session.plan(script, sensitive=True)
    fence = await session.run(plan)
    ended = await session.until(fence, "released")
    assert "the secret" not in json.dumps(ended)
    assert "the secret" in await session.output(fence)
