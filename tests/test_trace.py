"""`meshfuse trace`, modelled: its text, its files, and the errors for what cannot be traced."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfuse import cli
from meshfuse.executor.spans import KINDS, RankTime, Span, SpanKind, hidden_share, read_trace, write_trace
from meshfuse.report.trace import empty_folder

SCRIPT = """
import meshfuse as mf
mesh = mf.DeviceMesh((4,), ("tp",))
with mf.FusionDefinition() as fd:
    x, w = (fd.define_tensor([4096, 4096], dtype=mf.DataType.BFloat16) for _ in range(2))
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    for t, spec in ((x, [None, "tp"]), (w, [None, "tp"]), (y, [None, None])):
        fd.mesh_split(t, mesh, spec)
    fd.overlap(y, 4)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_modelled_trace_has_a_file_per_rank_and_says_what_was_hidden(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank9.json").write_text("of another run")
    assert cli.main(["trace", script, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks" in printed and "of which hidden" in printed and "times as long" in printed
    assert sorted(p.name for p in out.iterdir()) == [f"program0.rank{rank}.json" for rank in range(4)]
    rank, spans = read_trace(str(out / "program0.rank2.json"))
    assert rank == 2 and [s.name for s in spans if s.kind == "kernel"] == ["loop_0"] * 4
    assert sum(s.kind == "communication" and "all_reduce y" in s.name for s in spans) == 4
    events = json.loads((out / "program0.rank0.json").read_text())["traceEvents"]
    assert {"rank 0", "kernel", "communication", "wait"} == {e["args"]["name"] for e in events if e["ph"] == "M"}


def test_what_is_hidden_is_what_a_kernel_runs_beside(tmp_path: Path) -> None:
    """Between 3 and 4 the host does something else: that is neither hidden nor waited for."""
    spans = [Span("kernel", "k", 0.0, 3.0), Span("communication", "c", 1.0, 5.0), Span("wait", "c", 4.0, 5.0)]
    path = str(tmp_path / "deep" / "rank1.json")
    write_trace(path, 1, spans)
    rank, again = read_trace(path)
    assert rank == 1 and [(s.kind, s.name) for s in again] == [(s.kind, s.name) for s in spans]
    time = RankTime.of(rank, again)
    assert (time.end, time.hidden, time.exposed) == pytest.approx((5.0, 2.0, 1.0))
    assert hidden_share([time]) == pytest.approx(0.5)


_SPANS = st.tuples(st.sampled_from(KINDS), st.integers(0, 12), st.integers(0, 12))


@given(st.lists(_SPANS, max_size=10))
def test_hidden_seconds_are_those_counted_one_by_one(found: list[tuple[SpanKind, int, int]]) -> None:
    """In a kernel that calls another program there are kernels and waits."""
    spans = [Span(kind, kind, min(a, b), max(a, b)) for kind, a, b in found]

    def there(kind: SpanKind, second: int) -> int:
        return sum(s.kind == kind and s.start <= second < s.end for s in spans)

    running = [second for second in range(12) if there("kernel", second) and not there("wait", second)]
    time = RankTime.of(0, spans)
    assert time.hidden == sum(there("communication", second) for second in running)
    assert 0 <= time.hidden <= time.communicating


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]])
def test_a_trace_replaces_traces_and_no_other_file(
    ranks: list[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.launcher, "run", lambda *_: 1)
    kept = {
        "ranking.json",
        "rank.json",
        "frank2.json",
        "rank1.json.bak",
        "programs.rank.json",
        "program1.rank2.json.gz",
    }
    for name in kept | {"program7.rank9.json", "rank31.json"}:
        (tmp_path / name).write_text("{}")
    cli.main(["trace", script, *ranks, "--out", str(tmp_path)])
    left = {path.name for path in tmp_path.iterdir()}
    assert kept <= left and not left & {"program7.rank9.json", "rank31.json"}


def test_ranks_of_one_job_clear_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lists a file that the other has removed by then."""
    (tmp_path / "rank0.json").write_text("of another run")
    monkeypatch.setattr(os, "listdir", lambda _: ["rank1.json", "rank0.json"])
    empty_folder(str(tmp_path))
    assert not (tmp_path / "rank0.json").exists()


def test_real_ranks_that_execute_nothing_leave_no_trace_and_an_error(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.launcher, "run", lambda *_: 0)
    assert cli.main(["trace", script, "--ranks", "2", "--out", str(tmp_path)]) == 1
    assert "no trace: found no rank that executed a definition, needed one. Call fd" in capsys.readouterr().err


def test_what_cannot_be_traced_is_named(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(tmp_path / "no.py"), "--ranks", "2"]) == 2
    assert "no such script" in capsys.readouterr().err
    assert cli.main(["trace", script, "--ranks", "0", "--out", str(tmp_path / "out")]) == 1
    assert "wrong number of ranks" in capsys.readouterr().err
    assert cli.main(["trace", script, "--out", script]) == 1
    assert "cannot write traces" in capsys.readouterr().err
