"""`meshfuse trace --ranks`: what real ranks recorded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from meshfuse.executor.spans import read_trace

pytestmark = pytest.mark.ranks

SCRIPT = """
import torch, meshfuse as mf
torch.manual_seed(0)
mesh = mf.DeviceMesh((2,), ("tp",))
with mf.FusionDefinition() as fd:
    x, w = fd.define_tensor([64, 32]), fd.define_tensor([16, 32])
    y = fd.ops.linear(x, w)
    fd.add_output(y)
    for t, spec in ((x, [None, "tp"]), (w, [None, "tp"]), (y, [None, None])):
        fd.mesh_split(t, mesh, spec)
    fd.overlap(y, 4)
a, b = torch.randn(64, 32), torch.randn(16, 32)
for _ in range(2):
    (found,) = fd(a, b)
"""


def test_every_rank_records_kernels_communications_and_waits(
    job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    out = tmp_path / "traces"
    done = job(SCRIPT, "-m", "meshfuse", "trace", "--ranks", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "rank 0: kernels" in done.stdout and "hidden: " in done.stdout
    for rank in range(2):
        number, spans = read_trace(str(out / f"rank{rank}.json"))
        assert number == rank
        for kind, name in (("kernel", "loop_0"), ("communication", "all_reduce y"), ("wait", "all_reduce y")):
            assert sum(s.kind == kind and s.name.startswith(name) for s in spans) == 8, (kind, spans)
        assert all(s.end >= s.start for s in spans)


def test_nothing_is_hidden_where_each_communication_is_waited_for_at_once(
    job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """At the first call ranks connect while a communication is issued, which no kernel runs beside."""
    one = SCRIPT.replace("    fd.overlap(y, 4)\n", "")
    done = job(one, "-m", "meshfuse", "trace", "--ranks", "2", "--out", str(tmp_path / "traces"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of which hidden 0.0 us, ") == 2 and "hidden: 0% of all" in done.stdout, done.stdout


def test_a_trace_that_the_disk_has_no_room_for(
    job: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """As on a full disk, no file may grow beyond 20 bytes: the job ends as it would, with one line per rank."""
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
    out = tmp_path / "traces"
    # What forks print goes to files, which would not grow either.
    done = job(SCRIPT + full, "-m", "meshfuse", "trace", "--ranks", "2", "--out", str(out), real=True)
    assert "Traceback" not in done.stderr and done.returncode == 1, done.stderr
    for rank in range(2):
        assert f"rank {rank}: a trace cannot be written: found {out}/rank{rank}.json (File too large)" in done.stderr
    assert "meshfuse: no trace: found no rank that" in done.stderr and not list(out.iterdir())
