"""Many seeds on all cores, one seed to read, and what of the lifecycles was covered."""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ficc import failpoints
from ficc.domain import attempt, service
from simulation.controllers import Scaffold
from simulation.mutations import MUTATIONS, Mutation, broken
from simulation.world import Result, World

TRACE_LINES = 200


@contextmanager
def scaffold(*, doubted: bool = False) -> Iterator[Scaffold]:
    """In memory where there is room for it. `doubted`: whatever was read before is read again and compared."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="ficc-simulation-", dir=base))
    try:
        on = Scaffold(directory)
        on.reads.doubted = doubted
        yield on
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_seed(seed: int, on: Scaffold) -> Result:
    warnings.simplefilter("ignore", RuntimeWarning)  # of what a killed process did not come to await
    sys.unraisablehook = lambda _: None  # what is left of killed processes is collected with their world
    result = World(seed, on).run()
    gc.collect(0)
    return result


def _share(first: int, step: int, count: int, until: float) -> list[Result]:
    """Every `step`-th seed, so many of them, and on until the time has passed."""
    done: list[Result] = []
    with scaffold() as on:
        while len(done) < count or time.monotonic() < until:
            result = run_seed(first + step * len(done), on)
            if result.violation is None:
                result.trace = []
            done.append(result)
    return done


def run_many(first: int, count: int, *, seconds: float = 0.0, jobs: int | None = None) -> list[Result]:
    """The results of so many seeds, and of more until so long has passed."""
    jobs = jobs or len(os.sched_getaffinity(0))
    until = time.monotonic() + seconds
    shares = [(first + number, jobs, -(-(count - number) // jobs), until) for number in range(jobs)]
    if jobs == 1:
        return _share(*shares[0])
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return [result for results in pool.starmap(_share, shares) for result in results]


def first_caught(mutation: Mutation, first: int, count: int) -> Result | None:
    """The first of these seeds that notices."""
    with scaffold() as on, broken(mutation):
        for seed in range(first, first + count):
            result = run_seed(seed, on)
            if result.violation is not None:
                return result
    return None


def report(results: list[Result], seconds: float) -> str:
    passed: Counter[str] = Counter()
    transitions: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    settled: Counter[str] = Counter()
    for result in results:
        passed += result.passed
        transitions += result.transitions
        faults += result.faults
        settled += result.settled
    wanted = {
        f"attempt {one} → {other}" for (one, _), other in attempt.TRANSITIONS.items() if one is not other
    }
    wanted |= {
        f"service {one} → {other}" for (one, _), other in service.TRANSITIONS.items() if one is not other
    }
    # What happens before an executor has an attempt, or without it, is in the controllers' records only.
    hit = wanted & {name.replace("mirror ", "attempt ") for name in transitions}
    lines = [
        f"{len(results)} seeds, {sum(r.steps for r in results):,} steps, "
        f"{sum(r.virtual_seconds for r in results) / 3600:.1f} virtual hours, {seconds:.0f} s, "
        f"{seconds / max(1, len(results)) * 1000:.0f} ms a seed",
        f"faults: {', '.join(f'{name} {count}' for name, count in faults.most_common())}",
        f"services settled: {', '.join(f'{name} {count}' for name, count in settled.most_common())}",
        f"failpoints passed: {len(passed)} of {len(failpoints.NAMES)}",
        f"transitions covered: {len(hit)} of {len(wanted)}",
    ]
    missing = [name for name in failpoints.NAMES if name not in passed]
    if missing:
        lines.append(f"failpoints never passed: {', '.join(missing)}")
    if wanted - hit:
        lines.append(f"transitions never taken: {', '.join(sorted(wanted - hit))}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and print its trace")
    parser.add_argument("--quiet", action="store_true", help="print a digest of the trace instead")
    parser.add_argument(
        "--doubt", action="store_true", help="with --seed: compare what is remembered of the database"
    )
    parser.add_argument("--seeds", type=int, default=200, help="run so many, from --first on")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0, help="and more until so long has passed")
    parser.add_argument(
        "--mutation", choices=[one.name for one in MUTATIONS], help="break this rule on purpose"
    )
    parser.add_argument("--jobs", type=int)
    given = parser.parse_args(arguments)
    if given.seed is not None:
        with scaffold(doubted=given.doubt) as on:
            result = run_seed(given.seed, on)
        trace = "\n".join(result.trace)
        print(hashlib.sha256(trace.encode()).hexdigest() if given.quiet else trace)
        print(f"seed {given.seed}: {result.steps} steps, {result.violation or 'every promise was kept'}")
        return 1 if result.violation else 0
    if given.mutation is not None:
        mutation = next(one for one in MUTATIONS if one.name == given.mutation)
        caught = first_caught(mutation, given.first, given.seeds)
        print("not noticed" if caught is None else f"seed {caught.seed} noticed: {caught.violation}")
        return 0 if caught is None else 1
    began = time.monotonic()
    results = run_many(given.first, given.seeds, seconds=given.seconds, jobs=given.jobs)
    print(report(results, time.monotonic() - began))
    broken = [result for result in results if result.violation]
    for result in broken[:10]:
        print(f"\nseed {result.seed} broke a promise: {result.violation}")
    if broken:
        print("\n" + "\n".join(broken[0].trace[-TRACE_LINES:]))
        print(f"\nreplay: make simulate SEED={broken[0].seed}")
    return 1 if broken else 0
