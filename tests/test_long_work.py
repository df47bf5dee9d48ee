"""What long work says on stderr, and when it says nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import meshfuse as mf
from meshfuse import long_work


@pytest.fixture(autouse=True)
def _soon_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(long_work.VARIABLE)
    monkeypatch.setattr(long_work, "_AFTER", 0.02)
    monkeypatch.setattr(long_work, "_EVERY", 0.02)


def _work(seconds: float) -> None:
    with long_work.saying("counting"):
        time.sleep(seconds)


def test_a_line_says_what_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    _work(0.3)
    assert capsys.readouterr() == ("", "meshfuse: counting ...\n")


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_work, "_AFTER", 60.0)
    _work(0.0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("variable", "value"), [("MESHFUSE_QUIET", "1"), ("RANK", "1")])
def test_who_is_quiet(
    variable: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    _work(0.1)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_line_that_goes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _work(0.3)
    found = capsys.readouterr().err
    assert "\n" not in found and "\rmeshfuse: counting, 0 s" in found and found.endswith(" \r")


def test_an_error_comes_out_and_a_closed_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), long_work.saying("dividing"):
        raise ZeroDivisionError
    monkeypatch.setattr(sys, "stderr", None)
    _work(0.05)


def test_planning_saving_and_loading_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(long_work, "_AFTER", 0.0)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 8])
        fd.add_output(fd.ops.exp(x))
    fd.compile()
    mf.save(tmp_path / "kept", {"step": 1})
    mf.load(tmp_path / "kept")
    found = capsys.readouterr().err
    for text in ("planning 1 op of the definition of", f"saving {tmp_path}", f"loading {tmp_path}"):
        assert f"meshfuse: {text}" in found
