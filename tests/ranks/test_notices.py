"""Signals by which a batch system, a terminal or a user notifies a job: they reach the ranks' handlers.

Where no rank has one they end the job, as SIGTERM does.
"""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from rank_pool import alive, wait_until
from test_launching import LAUNCHER, launched

pytestmark = pytest.mark.ranks

NOTICES = [signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
each_notice = pytest.mark.parametrize("number", NOTICES, ids=lambda n: n.name)
# `script.py FOLDER RANK:SIGNAL...` has handlers, or ignores a signal (RANK:SIGNAL:ignored), until FOLDER has "end".
# Each rank has a child, which dies of any notice that it gets.
SCRIPT = """
import json, os, pathlib, signal, subprocess, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
def handler(number, frame):
    os.write(2, f"rank {rank} has {signal.Signals(number).name}\\n".encode())  # in one piece, beside other ranks' lines
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
for word in sys.argv[2:]:
    who, name, *ignored = word.split(":")
    if who == rank:
        signal.signal(getattr(signal, name), signal.SIG_IGN if ignored else handler)
(folder / f"{rank}.part").write_text(json.dumps([os.getpid(), child.pid]))
(folder / f"{rank}.part").rename(folder / f"{rank}.json")
until = time.monotonic() + 60
while not (folder / "end").exists() and time.monotonic() < until:
    time.sleep(0.02)
assert child.poll() is None, "the child has ended"
child.kill()
"""


class Running:
    """A job of two ranks that are ready, by `launched`."""

    def __init__(self, folder: Path, *handled: str):
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)
        words = [*LAUNCHER, "--ranks", "2"]
        self._job = launched(folder / "script.py", *words, args=[str(folder), *handled], stderr=subprocess.PIPE)

    def __enter__(self) -> Running:
        self.process = self._job.__enter__()
        assert wait_until(lambda: len(list(self.folder.glob("*.json"))) == 2)
        self.family = [pid for path in self.folder.glob("*.json") for pid in json.loads(path.read_text())]
        return self

    def __exit__(self, *error: object) -> None:
        self._job.__exit__(*error)
        assert wait_until(lambda: not any(alive(pid) for pid in self.family))

    def lines(self, count: int) -> list[str]:
        """The next lines of all ranks, in the order of the alphabet."""
        return sorted(self.process.stderr.readline().decode().removeprefix("[rank 1] ") for _ in range(count))

    def end(self) -> tuple[int, str]:
        """Let the ranks end; the exit code and what is left of the output."""
        (self.folder / "end").touch()
        left = self.process.communicate(timeout=30)[1].decode()
        return self.process.returncode, left


@each_notice
def test_a_notice_that_no_rank_has_a_handler_for_ends_the_job(tmp_path, number):
    with Running(tmp_path) as job:
        job.process.send_signal(number)
        output = job.process.communicate(timeout=30)[1].decode()
    assert (job.process.returncode, output) == (128 + number, f"meshfuse run: stopped by {number.name}\n")


@each_notice
def test_handlers_run_at_each_notice_and_the_job_goes_on(tmp_path, number):
    with Running(tmp_path, f"0:{number.name}", f"1:{number.name}") as job:
        for _ in range(2):
            job.process.send_signal(number)
            assert job.lines(2) == [f"rank {rank} has {number.name}\n" for rank in range(2)]
        assert job.end() == (0, "")


@pytest.mark.parametrize("one", [0, 1])
def test_a_rank_without_a_handler_goes_on_where_another_has_one(tmp_path, one):
    with Running(tmp_path, f"{one}:SIGUSR1") as job:
        job.process.send_signal(signal.SIGUSR1)
        assert job.lines(1) == [f"rank {one} has SIGUSR1\n"]
        assert job.end() == (0, "")


def test_a_notice_that_a_rank_ignores_ends_nothing(tmp_path):
    with Running(tmp_path, "0:SIGHUP:ignored", "1:SIGUSR2") as job:
        job.process.send_signal(signal.SIGHUP)
        job.process.send_signal(signal.SIGUSR2)
        assert job.lines(1) == ["rank 1 has SIGUSR2\n"]
        assert job.end() == (0, "")


def test_one_notice_has_a_handler_and_the_next_has_none(tmp_path):
    with Running(tmp_path, "0:SIGUSR1", "1:SIGUSR1") as job:
        job.process.send_signal(signal.SIGUSR1)
        assert len(job.lines(2)) == 2
        job.process.send_signal(signal.SIGUSR2)
        output = job.process.communicate(timeout=30)[1].decode()
    assert (job.process.returncode, output) == (128 + signal.SIGUSR2, "meshfuse run: stopped by SIGUSR2\n")


@each_notice
def test_a_notice_between_two_attempts_ends_the_job(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(5)")
    slow = "import sys\nfrom meshfuse.runtime import launcher\n"
    slow += f"sys.exit(launcher.run(1, [{str(script)!r}], max_restarts=1, pause=60))"
    (tmp_path / "launch.py").write_text(slow)
    with launched(tmp_path / "launch.py", stderr=subprocess.PIPE) as process:
        assert b"exited with code 5" in process.stderr.readline()
        assert b"restart 1 of 1" in process.stderr.readline()
        process.send_signal(number)
        output = process.communicate(timeout=30)[1].decode()
    assert (process.returncode, output) == (128 + number, f"meshfuse run: stopped by {number.name}\n")


TRAINS = """
import signal, sys, torch
from meshfuse.runtime.world import World
world = World.current()
noted = []
if sys.argv[1:] == ["with a handler"]:
    signal.signal(signal.SIGUSR1, lambda *_: noted.append(1))
group, step = world.group(world.all_ranks), 0
while True:
    told = torch.tensor([float(bool(noted))])
    group.all_reduce(told).wait()
    if told.item() == world.size:
        break
    step += 1
    if step == 100:
        sys.stderr.write("training\\n")
sys.stderr.write("saved\\n")  # In one piece, lest the other rank's line come between it and its end.
"""


@pytest.mark.parametrize("how", ["with a handler", "with none"])
def test_a_notice_of_preemption_in_the_middle_of_training(tmp_path, how):
    """The ranks have collectives under way; each that has no handler says where it was, as at SIGTERM."""
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    with launched(script, *LAUNCHER, "--ranks", "2", args=[how], stderr=subprocess.PIPE) as process:
        assert sorted(process.stderr.readline() for _ in range(2)) == [b"[rank 1] training\n", b"training\n"]
        process.send_signal(signal.SIGUSR1)
        output = process.communicate(timeout=60)[1].decode()
    if how == "with a handler":
        assert process.returncode == 0 and sorted(output.splitlines()) == ["[rank 1] saved", "saved"]
        return
    assert process.returncode == 128 + signal.SIGUSR1 and output.endswith("meshfuse run: stopped by SIGUSR1\n"), output
    for rank in range(2):
        line = f"rank {rank}: ended by SIGTERM, because rank {rank} is ended by the launcher, which got SIGUSR1. It "
        assert output.count(line) == 1, output
