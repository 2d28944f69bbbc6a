"""Run the benchmarks and print their figures as tables."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bench import acquire, content, lifecycle, listing, peers, profile, relay
from bench.setup import Bench

ALL: dict[str, Callable[[Bench], Awaitable[None]]] = {
    "json": relay.json_answers,
    "stream": relay.streams,
    "open": relay.open_streams,
    "slow": relay.slow_readers,
    "cancel": relay.cancellations,
    "upload": content.uploads,
    "acquire": acquire.acquisitions,
    "lifecycle": lifecycle.starts_and_stops,
    "leases": lifecycle.renewals,
    "list": listing.lists,
    "peers": peers.peers,
    "profile": profile.json_profile,
}
ONLY_BY_NAME = frozenset({"peers", "profile"})
"""These need what is nothing of ours."""


async def run(names: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="ficc-bench-") as directory, Bench(Path(directory)) as bench:
        await asyncio.to_thread(bench.prepare)
        for name in names:
            await bench.use("many" if name == "open" else "few")
            await ALL[name](bench)
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[*ALL, []], help="which; all of them by default but peers and profile"
    )
    options = parser.parse_args()
    uvloop.run(run(options.names or [name for name in ALL if name not in ONLY_BY_NAME]))


main()
