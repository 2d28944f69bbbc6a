"""The page of the contract says which tests there are, and every statement that this release covers has one."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from contract.statements import BY_ID, SECTIONS, STATEMENTS, Statement
from support import scripts

SCRIPT = scripts.SCRIPTS / "contract_page.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return scripts.load("contract_page")


def test_the_page_is_up_to_date_and_no_covered_statement_lacks_a_test() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_statement_has_an_id_of_its_own_in_a_section() -> None:
    assert len(BY_ID) == len(STATEMENTS)
    for letter in SECTIONS:
        numbers = [int(s.id.removeprefix(f"C-{letter}")) for s in STATEMENTS if s.id[2] == letter]
        assert numbers == list(range(1, len(numbers) + 1))


def test_what_is_missing_too_much_or_unknown_is_said(script: ModuleType) -> None:
    covered, later = Statement("C-H1", "covered"), Statement("C-H2", "later", "the next release")
    tests = script.Tests([("test_one.py", "test_it")])
    assert script.problems([covered, later], {"C-H1": tests}) == []
    assert script.problems([covered], {}) == ["C-H1 has no test in tests/contract"]
    assert script.problems([later], {"C-H2": tests}) == ["C-H2 is left for later and has a test"]
    assert script.problems([], {"C-H9": tests}) == ["C-H9: there is no such statement"]


def test_a_statement_with_a_test_that_is_expected_to_fail_is_not_held(script: ModuleType) -> None:
    statement = Statement("C-H1", "a statement")
    held, broken = script.Tests(), script.Tests()
    held.add("test_one.py", "test_it", [])
    broken.add("test_one.py", "test_it", [])
    broken.add("test_one.py", "test_it", ["not so"])
    assert "::`test_it` | held |" in script.render([statement], {"C-H1": held})
    page = script.render([statement], {"C-H1": broken})
    assert "::`test_it` | **not held**: not so |" in page
    assert "Of 1 statements 0 are held, 0 are left for later releases and 1 not held." in page
