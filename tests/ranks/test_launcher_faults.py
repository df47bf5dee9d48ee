"""What comes to the launcher itself: signals at bad moments, limits, and ranks that it would wait for without end."""

from __future__ import annotations

import errno
import os
import resource
import subprocess

import pytest
from test_launching import LAUNCHER, launched

from meshfuse.errors import ArgumentError
from meshfuse.runtime import launcher

pytestmark = pytest.mark.ranks


def test_a_signal_that_comes_while_a_rank_is_being_forked_ends_the_job(tmp_path):
    """In a callback after a fork, where Python drops what a handler raises."""
    script, launch = tmp_path / "script.py", tmp_path / "launch.py"
    script.write_text("import time\ntime.sleep(60)")
    launch.write_text(f"""
import os, signal
from meshfuse.runtime import launcher
left = [1]
os.register_at_fork(after_in_parent=lambda: left and left.pop() and os.kill(os.getpid(), signal.SIGINT))
raise SystemExit(launcher.run(1, [{str(script)!r}]))
""")
    with launched(launch, stderr=subprocess.PIPE) as process:
        output = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 130 and "meshfuse run: stopped by SIGINT" in output, output


def test_a_job_that_may_write_no_file_ends_well(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # noqa: E731
    with launched(script, *LAUNCHER, "--ranks", "1", stderr=subprocess.PIPE, preexec_fn=limit) as process:
        assert process.wait(30) == 0 and process.stderr.read() == b""


@pytest.mark.parametrize("started", range(3))
def test_a_process_that_cannot_be_started_leaves_no_file_open(tmp_path, monkeypatch, started):
    """The reaper, the first rank, the second: a caller of `run` goes on."""
    script, real, left = tmp_path / "script.py", subprocess.Popen, [None] * started
    script.write_text("import time\ntime.sleep(60)")

    def start(*args, **options):
        if not left:
            raise OSError(errno.EAGAIN, "no room")
        left.pop()
        return real(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ArgumentError, match="cannot be started: found no room"):
        launcher.run(2, [str(script)])
    assert os.listdir("/proc/self/fd") == before


def test_a_rank_that_is_stopped_when_the_others_have_ended_is_named(tmp_path):
    script, launch = tmp_path / "script.py", tmp_path / "launch.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)")
    launch.write_text(f"""
from meshfuse.runtime import launcher
launcher._REMIND = 0.5
raise SystemExit(launcher.run(3, [{str(script)!r}], timeout=3))
""")
    with launched(launch, stderr=subprocess.PIPE) as process:
        output = process.communicate(timeout=30)[1].decode()
    line = "meshfuse run: the other ranks have ended 0.5 s ago; waiting for rank 1 (stopped), for as long as --timeout"
    assert process.returncode == 124 and output.count(line) == 1, output


@pytest.mark.parametrize("calls", [2, 4, 7, 8])
def test_a_signal_as_the_launcher_takes_signals_or_gives_them_back(tmp_path, calls):
    """Of seven: SIGTERM comes when so many have been taken, or been given back."""
    script, launch = tmp_path / "script.py", tmp_path / "launch.py"
    script.write_text("")
    launch.write_text(f"""
import os, signal
from meshfuse.runtime import launcher
real, left = signal.signal, list(range({calls}))
def handle(number, handler):
    real(number, handler)
    if left and not left.pop():
        os.kill(os.getpid(), signal.SIGTERM)
signal.signal = handle
code = launcher.run(1, [{str(script)!r}])
assert signal.SIG_IGN not in map(signal.getsignal, (*launcher._STOPS, *launcher._NOTICES))
raise SystemExit(code)
""")
    with launched(launch, stderr=subprocess.PIPE) as process:
        output = process.communicate(timeout=30)[1].decode()
    assert (process.returncode, output) == (143, "meshfuse run: stopped by SIGTERM\n")


def test_a_signal_that_comes_while_a_lock_of_the_standard_library_is_taken_ends_the_job(tmp_path):
    """`Popen.poll` takes a lock that `Popen.wait` waits for: a handler that raised there left it taken for ever."""
    script, launch = tmp_path / "script.py", tmp_path / "launch.py"
    script.write_text("import time\ntime.sleep(60)")
    launch.write_text(f"""
import os, signal, threading
from meshfuse.runtime import launcher, spawn
class Lock:
    calls = 0
    def __init__(self): self.real = threading.Lock()
    def acquire(self, *args):
        taken = self.real.acquire(*args)
        Lock.calls += 1
        if Lock.calls == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return taken
    def release(self): self.real.release()
    def __enter__(self): return self.acquire()
    def __exit__(self, *error): self.release()
real = spawn.RankProcess
def with_lock(rank, process):
    process._waitpid_lock = Lock()
    return real(rank, process)
spawn.RankProcess = with_lock
raise SystemExit(launcher.run(1, [{str(script)!r}]))
""")
    with launched(launch, stderr=subprocess.PIPE) as process:
        output = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 130 and "meshfuse run: stopped by SIGINT" in output, output
