"""Estimates of memory: what is known adds up, what is not known is said to be unknown."""

from __future__ import annotations

from ficc.domain.estimate import Estimate, from_file_sizes


def test_an_estimate_from_file_sizes_guesses_nothing() -> None:
    estimate = from_file_sizes(1000)
    assert estimate.as_json() == {
        "weights_bytes": 1000,
        "kv_cache_bytes": None,
        "compute_bytes": None,
        "overhead_bytes": 64 << 20,
        "total_bytes": 1000 + (64 << 20),
        "basis": "file_size",
    }


def test_an_estimate_adds_what_it_knows() -> None:
    assert Estimate(1, 2, kv_cache_bytes=4, compute_bytes=8).total_bytes == 15
