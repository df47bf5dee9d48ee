"""Sessions over ranks that torchrun or `meshfuse run` has started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

import forked
from rank_pool import base_environment

import meshfuse.session as di
from meshfuse.errors import ArgumentError

SCRIPT = """
import sys
import torch
import meshfuse.session as di

with di.LaunchedSession(timeout=60) as s:
    x = s.call(lambda: torch.full((2,), di.worker_id() + 1.0))
    print("sum", s.allreduce(x)[1].tolist(), "of", s.num_workers, flush=True)
    if "fail" in sys.argv:
        s.call(lambda: 1 // (di.worker_id() - 1))
        s.sync()
print("ended", flush=True)
"""


def launch(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = [str(script) if word == "SCRIPT" else word for word in command]
    return forked.finished(["-m", *words], base_environment(TMPDIR=str(folder)), folder, 200)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "meshfuse"])
def test_a_session_over_launched_ranks(tmp_path: Path, launcher: str) -> None:
    command = {
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "SCRIPT"],
        "meshfuse": ["meshfuse", "run", "--ranks", "2", "SCRIPT", "fail"],
    }[launcher]
    done = launch(tmp_path, *command)
    assert "sum [3.0, 3.0] of 2" in done.stdout
    if launcher == "torchrun":
        assert done.returncode == 0 and done.stdout.endswith("ended\n")
    else:  # The controller's error ends the job, and no rank hangs.
        assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "ended" not in done.stdout


def test_without_a_launcher() -> None:
    with pytest.raises(ArgumentError, match="a LaunchedSession: found 1 ranks, 1 of them here, by none"):
        di.LaunchedSession()
