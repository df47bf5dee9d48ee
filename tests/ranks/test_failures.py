"""A rank that raises, dies or stops: every other rank ends soon, saying which one and why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import rank_pool
from rank_pool import RankFailed, RankPool, base_environment

import meshfuse as mf
from meshfuse.runtime.deadlines import bounded
from meshfuse.runtime.roll_call import line_of, main_thread_frame
from meshfuse.runtime.work import Work

pytestmark = pytest.mark.ranks

START = """
import os, signal, sys, time
import torch
from meshfuse.runtime.world import World
world = World.current()
group = world.group(world.all_ranks, "tp")
tensor = torch.ones(100_000)
group.all_reduce(tensor).wait()
"""


def run_bare(script: str, folder: Path, **more: Any) -> list[tuple[int | None, str]]:
    """Exit code and output of each rank of START and then the script."""
    return rank_pool.run_bare(START + script, folder, **more)


def let_go(folder: Path) -> Path:
    """A pipe: who reads it waits, in one call and thus in one line, until another opens it to write."""
    path = folder / "let go"
    path.exists() or os.mkfifo(path)
    return path


DEFAULT_GROUP = """
store = torch.distributed.PrefixStore("script", world.store)
torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
"""


@pytest.mark.parametrize("setup", ["", DEFAULT_GROUP], ids=["own groups", "torch's group too"])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_raise_reaches_every_rank(tmp_path, failing, setup):
    script = f"""
{setup}
def mistake():
    raise KeyError("the user's mistake")
if world.rank == {failing}:
    mistake()
group.all_reduce(tensor).wait()
"""
    results = run_bare(script, tmp_path)
    assert [code for code, _ in results] == [1, 1, 1]
    for rank, (_, text) in enumerate(results):
        assert 'KeyError: "the user\'s mistake"' in text and "in mistake" in text
        if rank != failing:
            assert f"all_reduce #2 of group tp (ranks 0, 1, 2) cannot finish on rank {rank}" in text
            assert f"found rank {failing} failed" in text


def error_of_torch(text: str) -> None:
    """Raise an error as torch does, and no script."""
    exec("raise RuntimeError(text)", {"__name__": "torch.distributed", "text": text})


class Late:
    """A backend's handle that a wait gives up just before the work has ended, with a result or an error."""

    def __init__(self, error: str | None, slices: int):
        self.error, self.slices = error, slices

    def wait(self, _limit: object) -> None:
        self.slices -= 1
        if self.slices >= 0:
            error_of_torch("Operation timed out!")
        if self.error:
            error_of_torch(self.error)

    def is_completed(self) -> bool:
        return self.slices <= 0


@pytest.mark.parametrize("slices", [0, 1, 3])
@pytest.mark.parametrize("error", [None, "Connection closed by peer"])
def test_what_ends_just_after_a_slice_of_a_wait_has_its_own_end(error, slices):
    reporter = unittest.mock.Mock(limit=60.0, explain=lambda work, error: mf.RankError(str(error)))
    work = Work(unittest.mock.Mock(world=reporter, issued=1), "all_reduce", ())
    work.attach(Late(error, slices), sliced=True)
    with pytest.raises(mf.RankError, match=error) if error else contextlib.nullcontext():
        work.wait()
    assert reporter.check.call_count == max(0, slices - 1)


@pytest.mark.parametrize("wait", ["group.all_reduce(tensor).wait()", "world.barrier()", "world.store.late()"])
def test_an_error_of_a_signals_handler_is_the_scripts_own(tmp_path, wait):
    """Whatever rank 0 or rank 1 waits in: a collective, a meeting, or the store, whose own errors are let go."""
    script = f"""
from meshfuse.runtime import deadlines
type(world.store).late = lambda _: deadlines.within(20, lambda: time.sleep(20))

def handler(*_):
    raise RuntimeError("enough of this step")

signal.signal(signal.SIGALRM, handler)
world.barrier()
if world.rank < 2:
    signal.setitimer(signal.ITIMER_REAL, 0.7 + 0.05 * world.rank)
    try:
        {wait}
    except RuntimeError as error:
        print("caught", type(error), error, flush=True)
time.sleep(3)  # Whoever ends first breaks what the others wait in.
os._exit(3)
"""
    results = run_bare(script, tmp_path)
    assert [code for code, _ in results] == [3, 3, 3]
    for _, text in results[:2]:
        assert "caught <class 'RuntimeError'> enough of this step" in text, text


def test_a_raise_reaches_ranks_of_other_groups(tmp_path):
    """Rank 0 waits for rank 1, which waits for rank 2, which fails."""
    script = """
first, second = (world.group(ranks, "pair") if world.rank in ranks else None for ranks in ((0, 1), (1, 2)))
if world.rank == 2:
    raise KeyError("the user's mistake")
if world.rank == 1:
    second.all_reduce(tensor).wait()
first.all_reduce(tensor).wait()
"""
    results = run_bare(script, tmp_path)
    assert [code for code, _ in results] == [1, 1, 1]
    assert all('KeyError: "the user\'s mistake"' in text for _, text in results)
    assert "found rank 2 failed" in results[0][1] and "found rank 2 failed" in results[1][1]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_killed_rank_is_named(tmp_path, failing):
    script = f"""
if world.rank == {failing}:
    os.kill(os.getpid(), signal.SIGKILL)
group.all_reduce(tensor).wait()
"""
    results = run_bare(script, tmp_path)
    for rank, (code, text) in enumerate(results):
        if rank == failing:
            assert code == -signal.SIGKILL
            continue
        assert code == 1
        assert "RankError: all_reduce #2 of group tp (ranks 0, 1, 2) failed on rank" in text
        assert "found a lost connection" in text
        assert re.search(rf"rank {failing} does not answer: its process \d+ has ended", text)


def test_a_stopped_rank_is_named(tmp_path):
    script = """
world.limit = 2  # From here on only: ranks that start late would time out before.
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
group.all_reduce(tensor).wait()
"""
    results = run_bare(script, tmp_path, stopped=2)
    assert [code for code, _ in results] == [1, 1, -signal.SIGKILL]
    for rank in (0, 1):
        text = results[rank][1]
        assert f"RankTimeout: all_reduce #2 of group tp (ranks 0, 1, 2) timed out on rank {rank}" in text
        assert "needed all ranks to arrive within 2 s" in text
        assert re.search(r"rank 2 does not answer: its process \d+ is stopped", text)
        assert f"rank {1 - rank} does not answer" not in text


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_wait_with_a_limit_of_its_own_says_that_one(tmp_path, stopped):
    """Saving waits longer than MESHFUSE_TIMEOUT, or as long as its argument says."""
    through = tmp_path / "through"
    through.mkdir()
    script = f"""
import meshfuse as mf
world.barrier()
os.mkdir(f"{through}/{{world.rank}}")
if world.rank == {stopped}:
    while len(os.listdir("{through}")) < world.size:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)
mf.save({str(tmp_path / "run")!r}, {{"w": tensor}}, timeout=1.5)
"""
    results = run_bare(script, tmp_path, stopped=stopped)
    for rank in {0, 1, 2} - {stopped}:
        code, text = results[rank]
        assert code == 1 and "RankTimeout: meshfuse.save, " in text
        assert "needed all ranks to arrive within 1.5 s" in text


def test_a_busy_rank_and_a_stopped_one_are_reported_differently(tmp_path):
    script = f"""
def long_loop():
    open("{let_go(tmp_path)}").close()
world.limit = 1  # From here on only: ranks that start late would time out before.
if world.rank == 1:
    long_loop()
try:
    group.all_reduce(tensor).wait()
finally:
    world.rank or open("{let_go(tmp_path)}", "w").close()
"""
    text = run_bare(script, tmp_path, size=2)[0][1]
    assert "RankTimeout" in text and "rank 1 runs long_loop at" in text


def test_a_rank_that_is_ended_names_the_function_it_was_in(tmp_path):
    """And not the handler of the signal, which the main thread runs."""
    script = """
def long_loop():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
if world.rank == 0:
    long_loop()
"""
    code, text = run_bare(script, tmp_path, size=2)[0]
    assert code == 128 + signal.SIGTERM
    assert "rank 0: ended by SIGTERM. It runs long_loop at script" in text


def test_a_wait_of_the_runtime_is_reported_as_the_users_call():
    frames = []
    bounded(5.0, lambda: frames.append(main_thread_frame()) or time.sleep(0.1))
    assert re.fullmatch(r"runs bounded at test_failures\.py:\d+", line_of(frames[0]))
    assert line_of(None) == "is exiting"


def test_a_rank_that_ended_early_is_named(tmp_path):
    script = """
if world.rank == 1:
    sys.exit(0)
group.recv(tensor, 1).wait()
"""
    results = run_bare(script, tmp_path, size=2)
    assert [code for code, _ in results] == [1, 0]
    assert "RankError: recv #2 of group tp (ranks 0, 1) failed on rank 0" in results[0][1]
    assert "rank 1 has finished" in results[0][1]


def test_a_missing_rank_of_a_barrier_is_named(tmp_path):
    """Rank 2 times out by itself, or hears of rank 0's time-out."""
    script = f"""
world.limit = 1
if world.rank == 1:
    open("{let_go(tmp_path)}").close()
try:
    world.barrier()
finally:
    world.rank == 2 and open("{let_go(tmp_path)}", "w").close()
"""
    text = run_bare(script, tmp_path, size=3)[2][1]
    assert "barrier timed out on rank 2" in text or "barrier cannot finish on rank 2: found rank 0" in text
    assert "rank 1 runs <module> at" in text
    assert "rank 0 runs" not in text and "does not answer" not in text


WHEREVER = f"""
from meshfuse.runtime.gloo import Gloo
from meshfuse.runtime.rendezvous import Rendezvous
left = {{count}}
def count(kind, name):
    real = getattr(kind, name)
    def call(*args):
        global left
        left -= 1
        if not left and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.{{how}})
        return real(*args)
    setattr(kind, name, call)
count(Gloo, "_issue")
count(Rendezvous, "_arrive")
{rank_pool.START}
fd(torch.ones(4, 6), torch.ones(2, 6))
world.barrier()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_wherever_a_rank_dies_the_others_name_it_and_a_line(tmp_path, how):
    """In every meeting and collective of a call: what is said, and what is no longer waited for."""
    for count in range(1, 20):
        script = "import os, signal\n" + WHEREVER.format(count=count, how=how)
        (_, other), (code, _) = results = rank_pool.run_bare(script, tmp_path, 2)
        if code == 0:
            break
        assert re.search(r"RankError: .* \(at script\.py:\d+\)\n", other) and "rank 1" in other, (count, results)
    assert 6 < count < 19


def test_a_missing_rank_0_is_an_error(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("from meshfuse.runtime.world import World; World.current()")
    environment = base_environment(
        RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1", MESHFUSE_TIMEOUT="1",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )  # fmt: skip
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "RankTimeout: rank 1 cannot reach the store of its job: found no answer at 127.0.0.1:1" in done.stderr


def test_errors_carry_the_users_line():
    from meshfuse.errors import RankError, SourceLine

    error = RankError("all_reduce failed: found this.\n    rank 1 says that")
    error.where = SourceLine("/a/b/script.py", 12)
    assert str(error) == "all_reduce failed: found this. (at script.py:12)\n    rank 1 says that"
    assert os.path.basename(error.where.file) == "script.py"


def test_a_pool_leaves_no_folder_behind():
    """After a good end, after a failure, which says what the rank printed, and when it was never started."""
    pool = RankPool(1)
    pool.close()
    assert pool.run("def main():\n    return 3\n") == [3]
    folder = pool.logs
    assert folder.exists()
    with pytest.raises(RankFailed, match=r"(?s)no luck.*printed before"):
        pool.run("import sys\ndef main():\n    print('printed before', flush=True)\n    raise OSError('no luck')\n")
    assert not folder.exists()
    assert pool.run("def main():\n    return 4\n") == [4]
    folder = pool.logs
    pool.close()
    assert not folder.exists()


def test_the_port_of_a_job_is_none_that_the_kernel_gives_away():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < int(rank_pool.free_port()) < first for _ in range(50))


CUT = """
import socket
def cut():
    port = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as found:
                ends = [found.getpeername(), found.getsockname()]
                if any(end[1:2] == (port,) for end in ends):
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # No socket, or one that listens.
world.barrier()
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_connection_to_the_store_that_breaks(tmp_path, victim):
    """The rank that serves it runs: the error says what is wrong, and nothing of a rank that does not answer."""
    script = rank_pool.START + CUT + f"if world.rank == {victim}:\n    cut()\nworld.barrier()\n"
    results = rank_pool.run_bare(script, tmp_path, 2, limit=5.0)
    text = results[victim][1]
    assert all(code == 1 for code, _ in results), results
    assert "rank 0 runs, but the connection to the store of the job, which it serves, is lost" in text, text
    assert not any("HUNG" in output or "its Python does not" in output for _, output in results), results
