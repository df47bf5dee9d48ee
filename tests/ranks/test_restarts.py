"""`meshfuse run --max-restarts`: new processes, a new store, the attempt known to the script, and an end to it."""

from __future__ import annotations

import signal

import pytest

from meshfuse.errors import ArgumentError
from meshfuse.runtime import launcher

pytestmark = pytest.mark.ranks

LAUNCHER = ("-m", "meshfuse.runtime.launcher", "--ranks", "2")
START = """
import os, signal, sys
import torch
import meshfuse as mf
world = mf.World.current()
tensor = torch.tensor([float(world.rank + 1)])
world.group(world.all_ranks, "all").all_reduce(tensor).wait()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_started_anew_with_the_others(job, tmp_path, victim):
    script = (
        START
        + f"""
with open("{tmp_path}/pids", "a") as file:
    file.write(f"{{world.attempt}} {{world.rank}} {{os.getpid()}} {{os.environ['MASTER_PORT']}}\\n")
world.barrier()
if world.attempt < 2 and world.rank == {victim}:
    os.kill(os.getpid(), signal.SIGKILL)
world.barrier()
world.rank or print("attempt", world.attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], tensor.item())
"""
    )
    done = job(script, *LAUNCHER, "--max-restarts", "2")
    assert (done.returncode, done.stdout) == (0, "attempt 2 2 3.0\n"), done.stderr
    lines = [line.split() for line in (tmp_path / "pids").read_text().splitlines()]
    assert sorted((a, r) for a, r, *_ in lines) == sorted((a, r) for a in "012" for r in "01")
    assert len({pid for *_, pid, _ in lines}) == 6
    assert f"rank {victim} was killed by SIGKILL; stopped the other ranks" in done.stderr
    assert "restart 1 of 2 in 1 s" in done.stderr and "restart 2 of 2 in 2 s" in done.stderr


def test_the_script_uses_torchs_own_group_in_each_attempt(job):
    script = (
        "import torch.distributed as dist; dist.init_process_group('gloo')\n"
        + START
        + """
torch.distributed.all_reduce(tensor)
if world.attempt == 0 and world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.barrier()
world.rank or print("attempt", world.attempt, tensor.item())
"""
    )
    done = job(script, *LAUNCHER, "--max-restarts", "1")
    assert (done.returncode, done.stdout) == (0, "attempt 1 6.0\n"), done.stderr


def test_restarts_are_used_up(job):
    script = START + "world.rank == 1 and sys.exit(5)\nworld.barrier()"
    done = job(script, *LAUNCHER, "--max-restarts", "1")
    assert done.returncode == 5
    assert done.stderr.rstrip().endswith("meshfuse run: gave up: all 1 restarts are used up")
    assert done.stderr.count("rank 1 exited with code 5; stopped the other ranks") == 2


ERRORS = {
    "before the ranks have met": "import meshfuse as mf\nmf.DeviceMesh((0,), ('tp',))",
    "after": START + "mf.DeviceMesh((0,), ('tp',))",
    "in an argument": START
    + """
with mf.FusionDefinition() as fd:
    x = fd.define_tensor([4])
    fd.add_output(fd.ops.relu(x))
fd.execute([torch.ones(5)])
""",
}


@pytest.mark.parametrize("when", ERRORS)
def test_an_error_of_the_script_is_final(job, when):
    # To import meshfuse is all that some ranks have come to.
    done = job(ERRORS[when], *LAUNCHER, "--max-restarts", "3", real=when.startswith("before"))
    assert done.returncode == 1
    assert "restart 1 of" not in done.stderr
    kind = "ArgumentError" if "argument" in when else "DefinitionError"
    assert (
        f"not restarted: rank 0 raised {kind}" in done.stderr or f"not restarted: rank 1 raised {kind}" in done.stderr
    )


def test_an_error_that_only_one_attempt_has_is_not(job):
    script = START + "assert world.attempt == 1, 'bad luck'\nworld.rank or print('attempt', world.attempt)"
    done = job(script, *LAUNCHER, "--max-restarts", "1")
    assert (done.returncode, done.stdout) == (0, "attempt 1\n"), done.stderr


def test_the_time_limit_is_of_all_attempts_together(job):
    done = job("import sys; sys.exit(1)", *LAUNCHER, "--max-restarts", "100", "--timeout", "4")
    assert done.returncode == launcher.TIMED_OUT_CODE, done.stderr
    assert "restart 3 of 100" not in done.stderr, "its pause alone would be over after the time limit"


def test_no_attempt_follows_a_pause_that_ends_after_the_time_limit(job):
    run = "launcher.run(2, sys.argv[1:], timeout=60, max_restarts=9, pause=100)"
    done = job("import sys; sys.exit(1)", "-c", f"import sys; from meshfuse.runtime import launcher; sys.exit({run})")
    message = "not restarted: the time limit is over before the next attempt, which would be in 100 s"
    assert done.returncode == launcher.TIMED_OUT_CODE and message in done.stderr, done.stderr
    assert "restart 1 of 9" not in done.stderr


def test_restarts_below_zero_are_an_error():
    with pytest.raises(ArgumentError, match="wrong number of restarts: found -1, needed 0 or more"):
        launcher.run(1, ["script.py"], max_restarts=-1)


def test_signals_have_names():
    assert launcher._how(-35) == "was killed by signal 35"
    assert launcher._how(-signal.SIGKILL) == "was killed by SIGKILL" and launcher._how(3) == "exited with code 3"
