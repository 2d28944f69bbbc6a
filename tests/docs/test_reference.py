"""Reference pages say what the code says, and every setting and code is described."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ficc.domain.reasons import REASONS
from ficc.protocol.http_api import CODES
from ficc.settings import Section, Settings

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ficc"


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


def written(constructor: str) -> set[str]:
    """The codes that are written as the first argument of a constructor."""
    calls = re.compile(rf'\b{constructor}\(\s*"([a-z_]+)"')
    return {code for path in SOURCE.rglob("*.py") for code in calls.findall(path.read_text())}


def test_every_code_that_is_raised_is_known() -> None:
    raised = written("Refused")
    assert "not_found" in raised
    assert raised <= set(CODES)


def test_every_reason_is_known_and_none_has_two_tables() -> None:
    given = written("Reason")
    assert "launch_failed" in given
    assert given <= {*CODES, *REASONS}
    assert not set(CODES) & set(REASONS)
    assert set(REASONS) <= given, "reasons that nothing gives"


def test_the_console_has_words_for_every_code() -> None:
    _, _, table = (SOURCE / "console" / "messages.js").read_text().partition("const codes = {\n")
    known = re.findall(r"^  ([a-z_]+): words\(", table.partition("\n};\n")[0], re.MULTILINE)
    assert len(known) == len(set(known))
    assert {*CODES, *REASONS} <= set(known)
