"""Reference pages say what the code says, and every setting and code is described."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ficc.protocol.http_api import CODES
from ficc.settings import Section, Settings

ROOT = Path(__file__).parents[2]


def test_the_reference_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts" / "reference.py"), str(tmp_path)], check=True)
    for page in tmp_path.iterdir():
        committed = ROOT / "docs" / "reference" / page.name
        assert committed.read_text() == page.read_text(), f"run `make docs`: {page.name} is out of date"


@pytest.mark.parametrize("section", [f for f in Settings.model_fields if f != "state_directory"])
def test_every_setting_is_described(section: str) -> None:
    kind = Settings.model_fields[section].annotation
    assert isinstance(kind, type)
    assert issubclass(kind, Section)
    assert not [name for name, field in kind.model_fields.items() if not field.description]


def test_every_code_that_is_raised_is_known() -> None:
    raised = set()
    for path in (ROOT / "src" / "ficc").rglob("*.py"):
        raised |= set(re.findall(r'Refused\(\s*"([a-z_]+)"', path.read_text()))
    assert raised <= set(CODES)
