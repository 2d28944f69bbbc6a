"""Two hundred downloads under everything at once: sources that lie, break, stall and change, pauses, a controller
that is killed. Each ends ready with the right bytes, or failed with the code of what was wrong with its source."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import source as sources
from support.registry import Registry
from support.source import Behaviour, Source

ROUNDS = 200
AT_ONCE = 8
BYTES_MAX = 3 << 20
SEED = int(os.environ.get("FICC_TEST_SEED", "20261129"))

PASSING: list[Callable[[random.Random], Behaviour]] = [
    lambda chance: sources.close_early(chance.randrange(1 << 20)),
    lambda chance: sources.close_early(chance.randrange(1 << 20), "reset"),
    lambda chance: sources.status(chance.choice([500, 502, 503, 429])),
    lambda chance: sources.ignore_range(),
    lambda chance: sources.wrong_start(chance.randrange(-1000, -1)),
    lambda chance: sources.gzipped(),
    lambda chance: sources.etag(f'"{chance.randrange(3)}"'),
    lambda chance: sources.etag(None),
    lambda chance: sources.chunked(),
    lambda chance: sources.corrupt(0),
    lambda chance: sources.trickle(64 << 10, 0.01),
]
PASSING_CODES = {"source_unavailable", "source_mismatch", "source_changed", "range_unsupported", "stalled"}
LASTING: list[tuple[str, Callable[[int], Behaviour]]] = [
    ("source_mismatch", lambda size: sources.corrupt(0)),
    ("source_mismatch", lambda size: sources.wrong_total(size + 7)),
    ("source_unavailable", lambda size: sources.status(404)),
    ("source_refused", lambda size: sources.redirect("http://localhost/plain")),
]


@dataclass
class Round:
    model: dict[str, Any]
    bodies: list[bytes]
    code: str | None
    """What it ends with, for good; None: it becomes ready in the end."""
    done: bool = False
    told: list[str] = field(default_factory=list)


@pytest.fixture
def registry(tmp_path: Path, source: Source) -> Iterator[Registry]:
    made = Registry(tmp_path, source, FICC_ACQUISITION_STALL_SECONDS="1")
    made.start("controller")
    yield made
    made.stop()


@pytest.mark.timeout(900)
def test_whatever_happens_a_download_ends_right(registry: Registry) -> None:
    chance = random.Random(SEED)
    for number in range(0, ROUNDS, AT_ONCE):
        rounds = [begin(registry, chance) for _ in range(AT_ONCE)]
        try:
            carry_on(registry, rounds, chance)
        except Exception as error:
            left = [(one, registry.model(one.model)) for one in rounds if not one.done]
            states = [(one.code, one.told, now["state"], now["error"], now["files"]) for one, now in left]
            raise AssertionError(f"seed {SEED}, round {number}: {states}") from error


def begin(registry: Registry, chance: random.Random) -> Round:
    bodies = [os.urandom(chance.randrange(1, BYTES_MAX)) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
    model = registry.register(*bodies)
    wrong, code = (chance.randrange(len(bodies)), None) if chance.random() < 0.25 else (None, None)
    for index, body in enumerate(bodies):
        path = registry.path(model, index)
        if index == wrong:
            code, lasting = chance.choice(LASTING)
            registry.source.always(path, lasting(len(body)))
        else:
            registry.source.script(
                path, *(chance.choice(PASSING)(chance) for _ in range(chance.randrange(5)))
            )
    registry.acquire(model)
    return Round(model, bodies, code)


def carry_on(registry: Registry, rounds: list[Round], chance: random.Random) -> None:
    """Disturb them a few times, then let them end."""
    for _ in range(chance.randrange(4)):
        one = chance.choice(rounds)
        match chance.choice(["pause", "pause", "kill", "end", "look"]):
            case "pause":
                if registry.pause(one.model).status == 202:
                    one.told.append("paused")
            case "kill":
                registry.kill("controller")
                registry.start("controller")
            case "end":
                registry.kill("controller", signal.SIGTERM)
                registry.start("controller")
            case _:
                registry.model(one.model)
    for one in rounds:
        registry.until(lambda one=one: ended(registry, one), "a download ends", seconds=60)


def ended(registry: Registry, one: Round) -> bool:
    """Look at it; go on with what was paused, or failed for what has passed."""
    now = registry.model(one.model)
    for file, body in zip(now["files"], one.bodies, strict=True):
        assert 0 <= file["offset"] <= len(body)
    if now["state"] == "ready":
        assert one.code is None, "its source is wrong for good"
        for body in one.bodies:
            assert registry.blob(body).read_bytes() == body
        one.done = True
    elif now["state"] == "failed":
        code = now["error"]["code"]
        one.told.append(code)
        assert code in PASSING_CODES | {one.code}
        assert len(one.told) < 20
        if code == one.code:
            one.done = True
        else:
            registry.acquire(one.model)
    elif now["state"] == "paused":
        registry.acquire(one.model)
    return one.done
