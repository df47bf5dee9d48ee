"""How a rank ends that has done its work: with no thread of gloo's or ours.

What comes back from torch into an interpreter that finalises ends the process by SIGABRT.
"""

from __future__ import annotations

import re

import pytest
from rank_pool import START, run_bare

pytestmark = pytest.mark.ranks

# What is registered before the ranks' own way to end runs after it, and is the last that does.
LEFT = """
import atexit, os, threading
def name_of(task):
    try:
        return open(f"/proc/self/task/{task}/comm").read()
    except OSError:
        return ""
def say_what_is_left():
    names = map(name_of, os.listdir("/proc/self/task"))
    gloo = [name for name in names if "pt_gloo" in name]  # Those that hold tensors.
    text = f"gloo: {gloo}\\nPython: {sorted(thread.name for thread in threading.enumerate())}\\n"
    os.write(1, text.encode())  # In one piece: a thread may be printing its traceback.
atexit.register(say_what_is_left)
"""
IN_A_THREAD = "threading.Thread(target=lambda: fd.execute(shards), daemon=True).start()"
SUM = "group = world.group(world.all_ranks)\ntensor = torch.ones(100_000)\ngroup.all_reduce(tensor).wait()\n"
ENDS = {
    "after a collective": SUM,
    "with one under way": SUM + "work = world.rank == {0} and group.all_reduce(tensor)\n"
    "if not work:\n    time.sleep(1)\n    group.all_reduce(tensor).wait()\n    assert tensor[0] == 4\n",
    "with one that nobody comes to": SUM + "work = world.rank == {0} and group.all_reduce(tensor)\n",
    "with a thread that executes": f"if world.rank == {{0}}:\n    {IN_A_THREAD}\n    time.sleep(0.3)\n"
    "else:\n    time.sleep(1.5)\n    assert fd.execute(shards)[0][0, 0] == 6\n",
    "with a thread that waits in vain": f"if world.rank == {{0}}:\n    {IN_A_THREAD}\n    time.sleep(0.3)\n",
    "with threads that go on": "def work():\n    while True:\n        fd.execute(shards)\n"
    "threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.5)\n",
}  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ENDS)
def test_no_thread_comes_back(tmp_path, how, rank):
    for code, text in run_bare(LEFT + START + ENDS[how].format(rank), tmp_path, 2):
        assert code == 0 and "gloo: []" in text, text
        # A thread of the script's may still print its traceback.
        assert re.search(r"Python: \['MainThread', ('Thread-1 \(\S+\)', )?'meshfuse-signals'\]", text), text
        assert "in vain" not in text and text.count("Error: ") <= 1, text


@pytest.mark.parametrize("words", ["meshfuse.runtime.launcher --ranks 2", "torch.distributed.run --nproc-per-node=2"])
def test_an_interpreter_that_finalises(job, words):
    script = START + ENDS["with a thread that executes"].format(1)
    more = [] if "meshfuse" in words else ["--master-addr=127.0.0.1", "--standalone"]
    done = job(script, "-m", *words.split(), *more, real=True)
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr


def test_a_collective_that_never_ends_is_reported(tmp_path):
    """One connection breaks when the other rank ends; that of the stopped one does not."""
    script = "world.limit = 1.5\nif world.rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    script += "work = group.all_reduce(tensor)\n"
    (code, text), _ = run_bare(START + SUM + script, tmp_path, 2, stopped=1)
    assert code == 1 and re.search(
        r"rank 0: ends, having waited 1\.5 s in vain for collectives that were issued and not waited for", text
    ), text
