"""What ranks do together comes in one order on all of them: after errors that were caught, with threads, with forks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_pool import START, run_bare

pytestmark = pytest.mark.ranks

TESTS = str(Path(__file__).parents[1])

CAUGHT = """
import sys
import torch
import meshfuse as mf
rank, size = mf.World.current().rank, mf.World.current().size
with mf.FusionDefinition() as fd:
    i = fd.define_tensor([2 * size], dtype=mf.DataType.Int)
    w = fd.define_tensor([16, 3])
    y = fd.ops.sum(fd.ops.index_select(w, i, 0), [0])
    fd.add_output(y)
    fd.mesh_split(i, mf.DeviceMesh((size,), ("tp",)), ["tp"])
table = torch.arange(48.0).reshape(16, 3)
mf.World.current().limit = {limit}  # From here on only: ranks that start late would time out before.
for step in range(12):
    indices = torch.full((2,), step)
    if step == 4 and rank in {failing}:
        indices[1] = 99
    try:
        (found,) = fd.execute([indices, table])
        assert torch.equal(found, table[step] * 2 * size), (step, found)
    except ValueError as error:
        print(f"step {{step}}: {{error}}", flush=True)
print("all steps")
"""


def test_an_error_that_one_rank_catches_mixes_no_steps_up(tmp_path):
    """Its next communication would meet the one that the others still wait for."""
    results = run_bare(CAUGHT.format(failing=[1], limit=2), tmp_path, 2)
    assert [code for code, _ in results] == [1, 1]
    (_, waiting), (_, caught) = results
    # Either gives up first.
    assert re.search(r"Rank(Timeout|Error): all-reduce of y \(t3\) over tp \(output\) in step 5", waiting), waiting
    assert "step 4: y (index_select): an index is out of range on rank 1" in caught
    place = "step 5 of the definition of y (t3) at script.py:9"
    assert f"comparing where executions ended: KernelError in {place}" in caught, caught
    assert "after 0 of 1 communications" in caught and "AssertionError" not in waiting + caught


def test_an_error_that_all_ranks_catch_lets_them_go_on(tmp_path):
    for code, text in run_bare(CAUGHT.format(failing=[0, 1], limit=20), tmp_path, 2):
        assert code == 0 and "step 4: y (index_select): an index is out of range" in text and "all steps" in text


SKIPPED = """
import contextlib, sys
import torch
import meshfuse as mf
from meshfuse.executor import spmd
sys.path.insert(0, {tests!r})
from interrupts import interrupted
rank, size = mf.World.current().rank, mf.World.current().size
with mf.FusionDefinition() as fd:
    x = fd.define_tensor([2 * size])
    y = fd.ops.sum(x, [0])
    fd.add_output(y)
    fd.mesh_split(x, mf.DeviceMesh((size,), ("tp",)), ["tp"])
whole, count = {whole}, {count}
mf.World.current().limit = {limit}
def call(step, wrong=False):
    given = torch.full((2 * size if whole else 2,), float(step))
    (found,) = fd(given) if whole else fd.execute([given.int() if wrong else given])
    assert found == step * 2 * size, (step, found)
for step in range(8):
    fails = step == 5 and rank in {failing}
    try:
        with interrupted(count, {file!r}) if fails and count else contextlib.nullcontext():
            call(step, fails and not count)
    except (ValueError, KeyboardInterrupt) as error:
        print(f"step {{step}}: {{type(error).__name__}}: {{error}}", flush=True)
        {again} and call(step)
print("all steps")
"""
# Whole tensors are passed; after so many calls in a file comes Ctrl-C: as arguments are looked at, before ranks may
# compare their calls, before the program, in it, after it, and where whole outputs are gathered. Or else an argument is
# wrong.
WHERE = {
    "argument": (False, 0, ""), "arguments": (False, 1, "/executor/argument_guards.py"),
    "turn": (False, 1, "/collective_order.py"),
    "begin": (False, 1, "/world.py"), "program": (False, 1, "/group.py"), "wait": (False, 4, "/work.py"),
    "end": (False, 5, "/collective_order.py"), "whole argument": (True, 1, "/value.py"),
    "whole output": (True, 5, "/group.py"),
}  # fmt: skip


def skipped(tmp_path, place, failing, limit, again=False):
    whole, count, file = WHERE[place]
    words = {"whole": whole, "count": count, "file": file, "failing": failing, "limit": limit, "again": again}
    return run_bare(SKIPPED.format(**words, tests=TESTS), tmp_path, 2)


@pytest.mark.parametrize(("place", "again"), [*((place, False) for place in WHERE), ("wait", True), ("end", True)])
def test_a_step_that_one_rank_leaves_out_or_repeats_meets_no_other(tmp_path, place, again):
    """Wherever an error came, as of a wrong batch, or Ctrl-C: others would take its next step for another one."""
    (code, waiting), (other, caught) = skipped(tmp_path, place, [1], 1.5, again)
    assert code == other == 1 and "AssertionError" not in waiting + caught, (waiting, caught)
    kind = "KeyboardInterrupt" if WHERE[place][1] else "ArgumentError"
    assert f"step 5: {kind}" in caught and f"comparing where executions ended: {kind} in step 6" in caught, caught


@pytest.mark.parametrize("place", ["argument", "program", "wait", "end"])
def test_a_step_that_all_ranks_leave_out_is_over(tmp_path, place):
    for code, text in skipped(tmp_path, place, [0, 1], 20):
        assert code == 0 and text.count("step ") == 1 and "all steps" in text, text


def test_no_execution_follows_one_that_failed_for_another_rank(tmp_path):
    """Other groups than the one that failed still connect ranks, which may be in other steps."""
    script = f"""world.limit = 1.5
while world.rank == 1 and not os.path.exists({str(tmp_path / "over")!r}):
    time.sleep(0.01)
for step in range(2):
    try:
        fd.execute(shards)
    except mf.RankTimeout:
        print("timed out", flush=True)
        open({str(tmp_path / "over")!r}, "w").close()
"""
    (code, text), _ = run_bare(START + script, tmp_path, 2)
    assert code == 1 and "timed out" in text
    assert re.search(
        r"RankError: an execution follows one that failed: found RankTimeout in step 2 of the definition of y \(t3\) "
        r"at script.py:11 \(plan \w+\), after 1 of 1 communications, needed ranks that go on together\. Let the error "
        r"end the process; meshfuse run --max-restarts starts all ranks anew\. \(at script.py:22",
        text,
    ), text


def test_threads_of_a_rank_execute_one_at_a_time(tmp_path):
    """They come in another order on each rank: their parts would be added up with those of another thread's.

    Rank 1 lets rank 0's first thread wait until the second one has come.
    """
    script = f"""
import pathlib
met = pathlib.Path({str(tmp_path / "met")!r})

def work():
    (found,) = fd.execute(shards)
    assert found[0, 0] == 6, found

def report(arguments):
    print(f"{{arguments.exc_type.__name__}}: {{arguments.exc_value}}", flush=True)
    met.touch()

threading.excepthook = report
while world.rank == 1 and not met.exists():
    time.sleep(0.01)
threads = [threading.Thread(target=work) for _ in range(2 - world.rank)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
fd.execute(shards)
"""
    (code, text), (other, _) = run_bare(START + script, tmp_path, 2, limit=20.0)
    assert (code, other) == (1, 1) and "AssertionError" not in text, text
    assert "ArgumentError: two threads execute at once: found thread 'Thread-" in text, text
    assert "Let one thread of a rank execute. (at script.py:22)" in text, text
    assert re.search(
        r"RankError: a call to execute follows one that failed: found two threads.*\(at script.py:37\)", text
    )


# The handler comes on rank 0 while it waits for rank 1, which begins later.
INTERRUPTED = """
signal.signal(signal.SIGUSR1, handler)
if world.rank == 0:
    def interrupt():
        while not world.waiting:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
    threading.Thread(target=interrupt).start()
else:
    time.sleep(1)
"""


def test_what_interrupts_an_execution_may_not_execute(tmp_path):
    """The handler comes while rank 0 waits in a step, and before rank 1 begins it: parts of both would be added up."""
    handler = """
def handler(*_):
    print("the handler got", fd.execute([10 * shards[0], shards[1]])[0][0, 0].item(), flush=True)
"""
    step = """
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGUSR1)
print("the step gave", fd.execute(shards)[0][0, 0].item(), flush=True)
"""
    (code, text), (other, _) = run_bare(START + handler + INTERRUPTED + step, tmp_path, 2, limit=10.0)
    assert (code, other) == (1, 1) and not re.search(r"^the (step|handler)", text, re.MULTILINE), text
    assert "ArgumentError: a call to execute interrupts another: found a signal's handler" in text, text
    assert "look at the note between calls. (at script.py:19)" in text, text


def test_an_error_of_what_interrupts_an_execution_is_not_lost_where_it_is_caught(tmp_path):
    """The other ranks may have made the call that this one was refused."""
    handler = """
def handler(*_):
    try:
        fd.execute(shards)
    except mf.ArgumentError:
        print("refused", flush=True)
"""
    (code, text), _ = run_bare(START + handler + INTERRUPTED + "fd.execute(shards)", tmp_path, 2, limit=10.0)
    assert code == 1 and "refused" in text, text
    assert "RankError: a call to execute follows one that failed: found a call to execute interrupts another" in text


def test_an_ops_function_may_execute(tmp_path):
    """It is called at the same place on all ranks, and may itself be what another one's program calls."""
    script = """
@mf.torch_op("a -> a", name="executing")
def executing(x):
    return x + fd.execute(shards)[0][0, 0]

mf.register_op(executing)
with mf.FusionDefinition() as outer:
    z = outer.define_tensor([4])
    outer.add_output(outer.ops.sum(outer.ops.executing(z), [0]))
    outer.mesh_split(z, mesh, ["tp"])

@mf.torch_op("a -> a", name="deeper")
def deeper(x):
    return x + outer.execute([torch.zeros(2)])[0]

mf.register_op(deeper)
with mf.FusionDefinition() as last:
    z = last.define_tensor([4])
    last.add_output(last.ops.sum(last.ops.deeper(z), [0]))
    last.mesh_split(z, mesh, ["tp"])
for _ in range(3):
    assert last.execute([torch.zeros(2)])[0].item() == 4 * 4 * 6
"""
    results = run_bare(START + script, tmp_path, 2)
    assert [code for code, _ in results] == [0, 0], results


def test_an_execution_at_the_exit_says_when(tmp_path):
    """By then this rank has left the job."""
    script = "import atexit\natexit.register(lambda: fd.execute(shards))\n" + START
    for code, text in run_bare(script, tmp_path, 2):
        assert code == 0 and text.count("Exception ignored in atexit") == 1
        assert "RankError: this rank has left its job: found a call to execute at the interpreter's exit" in text, text
        assert "Register functions that do so with atexit after meshfuse is first used" in text


def test_a_thread_that_goes_on_executing_at_the_exit(tmp_path):
    script = """
group = world.group(world.all_ranks)
def work():
    while True:
        group.all_reduce(torch.ones(3)).wait()
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    for _, text in run_bare(START + script, tmp_path, 2):
        assert "AttributeError" not in text, text


def test_threads_that_take_turns_may_execute(tmp_path):
    script = """
found = []
for number in range(3):
    thread = threading.Thread(target=lambda: found.append(fd.execute(shards)[0]))
    thread.start()
    thread.join()
assert [int(part[0, 0]) for part in found] == [6] * 3
"""
    assert [code for code, _ in run_bare(START + script, tmp_path, 2)] == [0, 0]


def test_a_fork_of_a_rank_is_none(tmp_path):
    """It has the rank's connections, and would speak on them between the rank's own words."""
    script = """
child = os.fork()
if not child:
    for call in (lambda: fd.execute(shards), world.barrier, lambda: mf.save("checkpoint", {"step": 1})):
        try:
            call()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)
os.waitpid(child, 0)
fd.execute(shards)
"""
    for rank, (code, text) in enumerate(run_bare(START + script, tmp_path, 2)):
        assert code == 0, text
        message = (
            f"RankError: this process is no rank: found a fork of the process of rank {rank}, needed the rank's own"
        )
        assert text.count(message) == 3, text
        assert len(re.findall(r"\(at script\.py:(20|22)\)", text)) == 3, text


def test_processes_that_ranks_start_are_none(job):
    """Nor do their failures end the job, be they orphans of which nothing tells that a rank started them."""
    script = """
import os, subprocess, sys, time
import meshfuse as mf
world = mf.World.current()
if "child" not in sys.argv:
    found = subprocess.run([sys.executable, __file__, "child"], capture_output=True, text=True, timeout=60)
    assert found.returncode
    print(world.rank, found.stderr.strip().splitlines()[-1], flush=True)
    world.barrier()
    if world.rank == 1:
        os.chdir(os.path.dirname(__file__))
        subprocess.run(f"({sys.executable} {__file__} child; echo $? > code) 2> errors &", shell=True, check=True)
        while not os.path.exists("code"):
            time.sleep(0.1)
        print("orphan", open("errors").read().strip().splitlines()[-1], flush=True)
    time.sleep(world.rank)  # for rank 0 to look after its peers while it waits
    world.barrier()
"""
    done = job(script, "-m", "meshfuse", "run", "--ranks", "2", "--all-output", real=True, MESHFUSE_TIMEOUT="60")
    assert done.returncode == 0, done.stderr
    message = "RankError: two processes are rank 1 of this job: found process"
    assert f"1 meshfuse.errors.{message}" in done.stdout and f"orphan meshfuse.errors.{message}" in done.stdout, (
        done.stdout
    )
    assert re.search(
        r"RankError: a second process is rank 0 of this job: found no socket \d+ of the launcher's \(.*\), needed one "
        r"process for each rank\. Start processes of your own without RANK and WORLD_SIZE\.", done.stdout,
    ), done.stdout  # fmt: skip


def test_one_rank_with_new_shapes_where_others_have_known_ones(tmp_path):
    script = """
for call in range(2):
    fd.execute(shards)
more = mf.shard_tensor(torch.ones(44, 6), x) if world.rank == 1 else shards[0]
fd.execute([more, shards[1]])  # the fourth call, before which ranks compare their order
"""
    for code, text in run_bare(START + script, tmp_path, 2):
        assert code == 1
        message = (
            "ranks disagree on what comes next: found rank 0 'comparing the order of calls'; rank 1 'comparing the"
        )
        assert message in text, text
