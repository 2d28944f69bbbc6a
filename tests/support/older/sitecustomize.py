"""Makes an executor one from before endpoints existed: it says nothing of `endpoint_version`. In PYTHONPATH of an
executor."""

from __future__ import annotations

from typing import Any

from ficc.executor.main import Executor

_snapshot = Executor.snapshot


def snapshot(self: Executor) -> dict[str, Any]:
    answer = _snapshot(self)
    del answer["snapshot"]["endpoint_version"]
    return answer


Executor.snapshot = snapshot  # type: ignore[method-assign]
