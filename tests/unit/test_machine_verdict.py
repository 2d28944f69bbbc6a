"""When a run in the machine counts as passed: only when tests ran, all passed, and none was skipped but those
marked for root."""

from __future__ import annotations

import pytest

from machine.verdict import judge

PASSED = '<testcase classname="a.b" name="passes"/>'
FAILED = '<testcase classname="a.b" name="fails"><failure message="assert 0"/></testcase>'
BROKEN = '<testcase classname="a.b" name="breaks"><error message="no fixture"/></testcase>'
ROOT = '<testcase classname="a.b" name="is_for_root"><skipped type="pytest.skip" message="needs root"/></testcase>'
OTHER = '<testcase classname="a.b" name="lacks"><skipped type="pytest.skip" message="no bwrap"/></testcase>'


def left(*cases: str, status: str = "0\n") -> dict[str, str]:
    """The files of a machine in which these test cases ran."""
    report = f'<?xml version="1.0"?><testsuites><testsuite>{"".join(cases)}</testsuite></testsuites>'
    return {"status": status, "report.xml": report}


def test_all_passed() -> None:
    verdict = judge(left(PASSED, PASSED))
    assert verdict.problems == []
    assert verdict.lines() == ["Passed: 2", "OK"]


def test_tests_for_root_are_named() -> None:
    verdict = judge(left(PASSED, ROOT))
    assert verdict.problems == []
    assert "  a.b.is_for_root" in verdict.lines()
    assert verdict.lines()[-1] == "OK"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "ended without a report"),
        (left(PASSED, status="1\n"), "status 1"),
        ({"status": "0\n"}, "left no report"),
        ({"status": "0\n", "report.xml": "<testsuites><testsuite>"}, "left no report"),
        (left(), "No test passed"),
        (left(ROOT), "No test passed"),
        (left(PASSED, FAILED), "Failed: a.b.fails"),
        (left(PASSED, BROKEN), "Failed: a.b.breaks"),
        (left(PASSED, OTHER), "Skipped: a.b.lacks (no bwrap)"),
    ],
)
def test_what_shows_nothing_has_failed(files: dict[str, str], words: str) -> None:
    verdict = judge(files)
    assert words in " ".join(verdict.problems)
    assert verdict.lines()[-1] == "FAILED"
