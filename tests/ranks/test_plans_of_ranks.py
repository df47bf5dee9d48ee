"""A rank that plans is no dead peer: of ranks that want a plan one makes it, and the others wait as long as it does."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from rank_pool import run_bare

pytestmark = pytest.mark.ranks

# Planning takes `seconds`, as if a program were larger; `begins` is called as it begins. It sleeps, as other tests
# need the cores; one test has `work` that is Python alone, as planning is. Waits end after 1.5 seconds, from here on
# only: ranks that start late would time out before.
BEGIN = """
import os, signal, sys, time
os.environ["MESHFUSE_CACHE"] = FOLDER
import torch
import meshfuse as mf
from meshfuse import compiler
world = mf.World.current()
rank = world.rank
real, seconds, begins, work = compiler.decided, 0.0, lambda: None, lambda: time.sleep(0.01)

def slow(graph, mesh, effort):
    print("plans here", flush=True)
    begins()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        work()
    return real(graph, mesh, effort)

def layer(ranks=range(world.size), op="relu"):
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([-1])
        y = fd.ops.sum(getattr(fd.ops, op)(x), [0])
        fd.add_output(y)
        fd.mesh_split(x, mf.DeviceMesh((len(ranks),), ("x",), ranks=list(ranks)), ["x"])
    return fd

def run(fd):
    (found,) = fd.execute([torch.ones(4)], idle_ranks=True)
    return found

known = layer(op="neg")
assert run(known) == -4 * world.size
compiler.decided = slow
world.barrier()
world.limit = 1.5
"""
PLANS = "plans here\n"
WHAT = r"plan(s|ned) 2 ops of the definition of y \(t2\) at script\.py:\d+"


def ranks(tmp_path: Path, script: str, size: int = 3, cache: str = "off", stopped: int | None = None):
    begin = BEGIN.replace("FOLDER", repr(cache))
    return run_bare(f"{begin}\n{script}", tmp_path, size, stopped=stopped)


@pytest.mark.parametrize("cache", ["off", "one", "each"])
def test_of_ranks_that_want_a_plan_one_makes_it(tmp_path: Path, cache: str) -> None:
    """With a folder of plans, without one, and with one for each rank, as hosts without a common disk have it."""
    where = {"off": "off", "one": str(tmp_path / "plans"), "each": "'"}[cache]
    script = "seconds = 4.0\nassert run(layer()) == 12\nprint('done')"
    if cache == "off":
        script = f"work = lambda: sum(range(1000))\n{script}"
    if cache == "each":
        script = f"os.environ['MESHFUSE_CACHE'] = f'{tmp_path}/{{rank}}'\n{script}"
    results = ranks(tmp_path, script, cache="off" if cache == "each" else where)
    assert [code for code, _ in results] == [0] * 3, results
    text = "".join(text for _, text in results)
    assert text.count(PLANS) == 1 and text.count("done") == 3, text
    # Two seconds after it begins, the rank that plans says so; the others leave it to that one.
    line = (
        r"rank (\d): plans 2 ops of the definition of y \(t2\) at script\.py:\d+, for 2 s so far; the others wait for"
    )
    assert len(re.findall(line, text)) == 1, text
    assert re.search(r"rank \d: planned 2 ops of the definition of y \(t2\) at script\.py:\d+ in [4-9]\.\d s", text), (
        text
    )


def test_short_planning_prints_nothing(tmp_path: Path) -> None:
    results = ranks(tmp_path, "assert run(layer()) == 12")
    assert all(code == 0 and "ops of" not in text for code, text in results), results


USER_OP = """
@mf.torch_op("a -> a", name="twice")
def twice(x):
    return 2 * x
mf.register_op(twice)
seconds = 4.0
assert run(layer(op="twice")) == 24
"""


def test_a_plan_with_a_users_op_is_made_once_in_a_job(tmp_path: Path) -> None:
    results = ranks(tmp_path, USER_OP, cache=str(tmp_path / "plans"))
    assert [code for code, _ in results] == [0] * 3, results
    assert sum(text.count(PLANS) for _, text in results) == 1


@pytest.mark.parametrize("slowest", [0, 1])
def test_different_programs_are_an_error_however_long_ranks_plan(tmp_path: Path, slowest: int) -> None:
    script = f"seconds = 5.0 if rank == {slowest} else 0.0\nrun(layer(op='relu' if rank == 1 else 'abs'))"
    results = ranks(tmp_path, script)
    assert [code for code, _ in results] == [1] * 3
    message = "ranks disagree on the program: found ranks 0, 2 't1 = fd.ops.abs(t0)'; rank 1 't1 = fd.ops.relu(t0)'"
    assert all(message in text and "Timeout" not in text for _, text in results), results


def test_waits_go_on_while_a_peer_plans_something_else(tmp_path: Path) -> None:
    """In a collective, in a meeting, and for a rank that itself waits for the one that plans."""
    script = """
seconds = 4.0
if rank == 2:
    layer(op="abs").compile([12])
assert run(known) == -12            # in a collective
if rank == 1:
    layer(op="exp").compile([12])
world.barrier()                     # in a meeting
if rank == 0:
    layer(op="sin").compile([12])
seconds = 0.0
if rank < 2:                        # rank 0 comes late, and rank 2 waits for rank 1
    assert run(layer((0, 1))) == 8
if rank > 0:
    assert run(layer((1, 2))) == 8
print("done")
"""
    results = ranks(tmp_path, script)
    assert all(code == 0 and "done" in text for code, text in results), results


# Rank 1 makes the plan: the others come when it has begun.
FIRST = """
def begins():
    rank == 1 and open(BEGUN, "w").close()
while rank != 1 and not os.path.exists(BEGUN):
    time.sleep(0.01)
seconds = 30.0
"""


def first(tmp_path: Path, what: str, **more):
    begun = repr(str(tmp_path / "begun"))
    return ranks(tmp_path, FIRST.replace("BEGUN", begun) + what, **more)


def test_the_rank_that_plans_is_killed(tmp_path: Path) -> None:
    kill = "rank == 1 and __import__('threading').Timer(2.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
    (code, text), (killed, _), (other, more) = first(tmp_path, kill + "run(layer())")
    assert (code, killed, other) == (1, -signal.SIGKILL, 1)
    for message in (text, more):
        assert "RankError: waiting for rank 1's plan of 2 ops of the definition of y (t2)" in message, message
        assert re.search(r"rank 1 does not answer: its process \d+ has ended", message) and "(at script.py:" in message
        assert "Timeout" not in message and PLANS not in message


def test_the_rank_that_plans_is_stopped(tmp_path: Path) -> None:
    stop = "rank == 1 and __import__('threading').Timer(2.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()\n"
    results = first(tmp_path, stop + "run(layer())", stopped=1)
    for code, text in (results[0], results[2]):
        assert code == 1 and PLANS not in text
        assert re.search(r"rank 1 does not answer: its process \d+ is stopped", text), text
        assert "waiting for rank 1's plan of 2 ops of the definition of y (t2)" in text and "(at script.py:" in text


@pytest.mark.parametrize("error", ["KeyError('the mistake')", "KeyboardInterrupt()"])
def test_the_rank_that_plans_raises(tmp_path: Path, error: str) -> None:
    """The others then plan themselves, for longer than they would wait."""
    script = f"""
seconds = 2.0
def fails(graph, mesh, effort):
    slow_begins()
    time.sleep(2.0)
    raise {error}
slow_begins = begins
if rank == 1:
    compiler.decided = fails
run(layer())
"""
    results = first(tmp_path, script)
    name = error.partition("(")[0]
    assert all(code for code, _ in results) and name in results[1][1], results
    for _, text in (results[0], results[2]):
        assert name in text and "found rank 1 failed" in text and "Timeout" not in text, text


def test_an_error_in_planning_that_is_caught_has_the_others_plan(tmp_path: Path) -> None:
    script = """
def fails(graph, mesh, effort):
    begins()
    time.sleep(2.0)
    raise KeyboardInterrupt
fd, seconds = layer(), 0.0
if rank == 1:
    compiler.decided = fails
    try:
        fd.compile([12])
    except KeyboardInterrupt:
        print("caught")
    compiler.decided = slow
assert run(fd) == 12
print("done")
"""
    results = first(tmp_path, script)
    assert all(code == 0 and "done" in text for code, text in results), results
    assert "rank 1: gave up planning 2 ops of the definition of y (t2)" in results[1][1] and "caught" in results[1][1]
    # Each for itself, or one of them for those that look later: the interrupted one has begun anew by then.
    assert 1 <= sum(text.count(PLANS) for _, text in results) <= 3


def test_a_rank_that_is_ended_while_it_plans_says_so(tmp_path: Path) -> None:
    script = "rank == 1 and __import__('threading').Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
    results = first(tmp_path, script + "run(layer())")
    assert re.search(rf"rank 1: ended by SIGTERM. It {WHAT}, for \d s so far", results[1][1]), results
    assert all(code == 1 for code, _ in (results[0], results[2])), results


def test_few_plans_are_left_in_the_store(tmp_path: Path) -> None:
    script = """
fds = [layer(op=op) for op in "relu abs exp sin cos tanh sqrt floor ceil erf sinh cosh tan".split()]
keys, real_text = [], world.handover.text
def noted(key, *more):
    keys.append(key)
    return real_text(key, *more)
world.handover.text = noted
for fd in fds:
    run(fd)
world.barrier()
there = [world.store.check([f"handed/{key}"]) for key in keys]
assert len(set(keys)) == 13 and sum(there) <= 4 * world.size and there[-1], there
"""
    results = ranks(tmp_path, script)
    assert all(code == 0 for code, _ in results), results


# Rank 2 takes no part in these programs and runs ahead, so that it makes the plans. It is slow to take the first one
# back from the store, half a second for each key, and the others come for it one after the other.
AHEAD = """
class Slow:
    def __init__(self, store):
        self.store, self.slow = store, "none"
    def __getattr__(self, name):
        return getattr(self.store, name)
    def delete_key(self, key):
        found = self.store.delete_key(key)
        if self.slow in key:
            open(BEGUN, "w").close()
            time.sleep(0.5)
        return found

fds = [layer((0, 1), op) for op in "relu abs exp sin cos tan".split()]
if rank == 2:
    store = Slow(world.store)
    type(world.handover)._store = property(lambda self: store)
    fds[0].execute([torch.ones(8)], idle_ranks=True)
    store.slow = world.handover._made[-1]
    for fd in fds[1:]:
        fd.execute([torch.ones(8)], idle_ranks=True)
else:
    while not os.path.exists(BEGUN):
        time.sleep(0.01)
    time.sleep(0.75 * rank)
    start = time.monotonic()
    assert run(fds[0]) == 8
    assert time.monotonic() - start < world.limit, "waited for a plan that nobody makes"
print("done")
"""


def test_a_rank_that_runs_ahead_takes_no_plan_back_that_others_wait_for(tmp_path: Path) -> None:
    results = ranks(tmp_path, AHEAD.replace("BEGUN", repr(str(tmp_path / "begun"))))
    assert all(code == 0 and "done" in text for code, text in results), results


# Rank 2 hands over the first plan, and takes it back between two looks of the others: they see it there, and then read.
BETWEEN = """
handover = type(world.handover)
there = handover._is_there

def slow_to_read(self, *args):
    found = there(self, *args)
    if found:
        time.sleep(1.0)
    return found

handover._is_there = slow_to_read
fds = [layer((0, 1), op) for op in "relu abs exp sin cos tan".split()]
if rank == 2:
    seconds = 1.0
    begins = lambda: open(BEGUN, "w").close()
    fds[0].execute([torch.ones(8)], idle_ranks=True)
    seconds, begins = 0.0, lambda: None
    for fd in fds[1:]:
        fd.execute([torch.ones(8)], idle_ranks=True)
else:
    while not os.path.exists(BEGUN):
        time.sleep(0.01)
    assert run(fds[0]) == 8
print("done")
"""


def test_a_plan_that_is_taken_back_between_two_looks_is_made_anew(tmp_path: Path) -> None:
    results = ranks(tmp_path, BETWEEN.replace("BEGUN", repr(str(tmp_path / "begun"))))
    assert all(code == 0 and "done" in text for code, text in results), results
