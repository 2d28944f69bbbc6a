"""Whether a run in the machine shows what it is to show: a pure function of pytest's report."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field

ROOT_ONLY = "needs root"
"""Why a test may be skipped: its mark says so. Any other reason is a failure, since then nothing was shown."""


@dataclass
class Verdict:
    passed: int = 0
    root_only: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        said = [f"Passed: {self.passed}"]
        if self.root_only:
            said += [f"Root only, not run: {len(self.root_only)}", *(f"  {name}" for name in self.root_only)]
        return [*said, *self.problems, "FAILED" if self.problems else "OK"]


def judge(files: Mapping[str, str]) -> Verdict:
    """Of the files that the machine left: `status` is pytest's exit status, `report.xml` its JUnit report."""
    verdict = Verdict()
    if "status" not in files:
        verdict.problems.append("The machine ended without a report.")
        return verdict
    if (status := files["status"].strip()) != "0":
        verdict.problems.append(f"pytest ended with status {status}.")
    try:
        cases = list(ElementTree.fromstring(files.get("report.xml", "")).iter("testcase"))
    except ElementTree.ParseError:
        verdict.problems.append("pytest left no report.")
        return verdict
    for case in cases:
        _count(case, verdict)
    if not verdict.passed:
        verdict.problems.append("No test passed.")
    return verdict


def _count(case: ElementTree.Element, verdict: Verdict) -> None:
    name = f"{case.get('classname')}.{case.get('name')}"
    if case.find("failure") is not None or case.find("error") is not None:
        verdict.problems.append(f"Failed: {name}")
    elif (skipped := case.find("skipped")) is None:
        verdict.passed += 1
    elif (reason := skipped.get("message", "")) == ROOT_ONLY:
        verdict.root_only.append(name)
    else:
        verdict.problems.append(f"Skipped: {name} ({reason})")
