"""What commands print, off a terminal."""

from __future__ import annotations

import pytest

from ficc.cli import output
from ficc.cli.output import Meter


def test_a_row_of_a_table_is_one_line_however_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "sha256:" + "0" * 64
    output.show_table(["NAME", "DIGEST"], [["a", long], ["日本", None], ["[bold]", "x"]], "nothing")
    assert capsys.readouterr().out.splitlines() == [
        "NAME    DIGEST",
        f"a       {long}",
        "日本    –",
        "[bold]  x",
    ]


def test_a_table_of_nothing_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_table(["NAME"], [], "Make one first.")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "Make one first.\n")


def test_progress_says_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Meter("file", 100) as meter:
        for done, phase in (
            (0, "copied"),
            (50, "copied"),
            (100, "copied"),
            (100, "copied"),
            (100, "verified"),
        ):
            meter.at(done, phase)
        meter.at(100, "verified")
    assert capsys.readouterr().err.splitlines() == [
        "file    0 %  0 B of 100 B copied",
        "file  100 %  100 B of 100 B copied",
        "file  100 %  100 B of 100 B verified",
    ]


def test_an_error_has_its_code_behind_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_error(
        "It ended. Its last words:\nno such file", "engine_exited", as_json=False, hints=["Try X"]
    )
    assert capsys.readouterr().err.splitlines() == [
        "Error: It ended. Its last words: (engine_exited)",
        "  no such file",
        "  Try X",
    ]
