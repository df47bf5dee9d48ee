"""`meshfuse run`, torchrun and scripts that use torch.distributed themselves; no process stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import forked
import pytest
from rank_pool import alive, base_environment, free_port, wait_until

from meshfuse.errors import ArgumentError
from meshfuse.runtime import launcher

pytestmark = pytest.mark.ranks

LAUNCHER = ("-m", "meshfuse.runtime.launcher")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1")
SUM = """
import torch
from meshfuse.runtime.world import World
world = World.current()
tensor = torch.tensor([float(world.rank + 1)])
world.group(world.all_ranks, "all").all_reduce(tensor).wait()
"""


def test_launcher_runs_ranks(job):
    script = SUM + "import sys; print(world.place.source, world.rank, world.size, tensor.item(), sys.argv[1:])"
    done = job(script, *LAUNCHER, "--ranks", "2", args=("--mesh", "tp=2"), real=True)
    assert done.stdout == "meshfuse run 0 2 3.0 ['--mesh', 'tp=2']\n", done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def test_launcher_shows_all_output_with_its_option(job):
    script = "import os, sys; print('out', os.environ['RANK']); print('err', os.environ['RANK'], file=sys.stderr)"
    quiet = job(script, *LAUNCHER, "--ranks", "3", real=True)
    assert quiet.stdout == "out 0\n"
    assert sorted(quiet.stderr.splitlines()) == ["[rank 1] err 1", "[rank 2] err 2", "err 0"]
    loud = job(script, *LAUNCHER, "--ranks", "3", "--all-output", real=True)
    assert sorted(loud.stdout.splitlines()) == ["[rank 1] out 1", "[rank 2] out 2", "out 0"]


def test_a_forked_rank_writes_into_no_file_that_the_launcher_had(job):
    """As a process of its own: what its libraries know of files is of those that it has opened itself."""
    script = """
    import multiprocessing, select, socket
    pairs = [socket.socketpair() for _ in range(40)]
    multiprocessing.RLock(), multiprocessing.Value("i")
    ends = [end for pair in pairs for end in pair]
    print(select.select(ends, [], [], 0.1)[0], len({end.fileno() for end in ends}))
    """
    assert job(script, *LAUNCHER, "--ranks", "1").stdout == "[] 80\n"


def test_lines_of_ranks_are_not_mixed_where_they_write_in_pieces(job):
    script = "import os\nfor i in range(4000): print('line', os.environ['RANK'], i)"
    loud = job(script, *LAUNCHER, "--ranks", "3", "--all-output", real=True, PYTHONUNBUFFERED="1")
    of = {rank: f"[rank {rank}] " if rank else "" for rank in range(3)}
    assert sorted(loud.stdout.splitlines()) == sorted(f"{of[r]}line {r} {i}" for r in range(3) for i in range(4000))


@pytest.mark.parametrize("failing", [0, 1])
def test_launcher_shows_the_first_traceback_once(job, failing):
    script = SUM + f"\nassert world.rank != {failing}, 'bad weights'\nworld.barrier()"
    done = job(script, *LAUNCHER, "--ranks", "2")
    assert done.returncode == 1
    assert done.stderr.count("AssertionError: bad weights") == 1
    assert f"meshfuse run: rank {failing} exited with code 1; stopped the other ranks" in done.stderr


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_ends_before_it_joins_is_not_waited_for(job, early):
    """Its process is known to the launcher alone; the limit is longer than the test may take."""
    done = job(f"import os, sys\nos.environ['RANK'] == '{early}' and sys.exit(0)\n" + SUM, *LAUNCHER, "--ranks", "3")
    assert done.returncode == 1 and "RankError: " in done.stderr and f"rank {early} has finished" in done.stderr


def test_launcher_ends_ranks_that_ignore_a_failure(job):
    script = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "1":
        sys.exit(7)
    time.sleep(600)
    """
    done = job(script, *LAUNCHER, "--ranks", "3")
    assert done.returncode == 7
    assert "rank 1 exited with code 7" in done.stderr


def test_launcher_needs_a_rank():
    with pytest.raises(ArgumentError, match="wrong number of ranks: found 0, needed 1 or more"):
        launcher.run(0, ["script.py"])


def test_launcher_names_a_signal_and_a_time_limit(job):
    killed = job("import os; os.environ['RANK'] == '1' and os.abort()", *LAUNCHER, "--ranks", "2")
    assert killed.returncode == 128 + signal.SIGABRT
    assert "rank 1 was killed by SIGABRT" in killed.stderr
    late = job("import time; time.sleep(600)", *LAUNCHER, "--ranks", "2", "--timeout", "0.5")
    assert late.returncode == 124 and "ranks [0, 1] still run" in late.stderr


def test_launcher_restarts_a_failed_job(job):
    script = (
        SUM
        + """
import os
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
assert attempt != "0" or world.rank == 0, "first attempt"
world.barrier()
print("attempt", attempt, tensor.item())
"""
    )
    done = job(script, *LAUNCHER, "--ranks", "2", "--max-restarts", "1")
    assert (done.returncode, done.stdout) == (0, "attempt 1 3.0\n"), done.stderr


FAMILY = """
import json, os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
path = pathlib.Path(sys.argv[1]) / os.environ["RANK"]
path.with_suffix(".part").write_text(json.dumps([os.getpid(), child.pid]))
path.with_suffix(".part").rename(path.with_suffix(".json"))
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_launcher_leaves_no_process_behind(tmp_path, number):
    """Ranks that do not even use meshfuse, and the processes that they started."""
    script = tmp_path / "script.py"
    script.write_text(FAMILY)
    process = subprocess.Popen(
        [sys.executable, *LAUNCHER, "--ranks", "2", str(script), str(tmp_path)],
        env=base_environment(), stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.json"))) == 2)
        family = [pid for path in tmp_path.glob("*.json") for pid in json.loads(path.read_text())]
        assert len(family) == 4 and all(alive(pid) for pid in family)
        process.send_signal(number)
        process.wait(30)
        assert wait_until(lambda: not any(alive(pid) for pid in family))
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)


CHATTER = """
import os, sys
sys.stdout.reconfigure(encoding="utf-8")
for number in range(9000):
    print("\\u00b5", os.environ["RANK"], number, flush=True)
    print("\\u00b5", os.environ["RANK"], number, flush=True, file=sys.stderr)
"""
ALL_OUTPUT = [*LAUNCHER, "--ranks", "2", "--all-output"]


@pytest.mark.parametrize("to", ["head", "head of errors", "/dev/full", "1>&-", "2>&-", "0<&- 1>&- 2>&-", "ascii"])
def test_a_launcher_whose_output_goes_nowhere_ends(tmp_path, to):
    """Ranks whose lines nobody can take would wait for that without end."""
    script = tmp_path / "script.py"
    script.write_text(CHATTER)
    where = {
        "head": "| head -n 3",
        "head of errors": "2>&1 >/dev/null | head -n 3",
        "/dev/full": "> /dev/full",
        "ascii": "",
    }
    command = f"{sys.executable} {' '.join(ALL_OUTPUT)} {script} {where.get(to, to)}"
    plain = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"} if to == "ascii" else {}
    done = subprocess.run(
        command, shell=True, env=base_environment(**plain), capture_output=True, text=True, timeout=30
    )  # fmt: skip
    assert "rank-" not in done.stderr and "launcher.py" not in done.stderr and "output.py" not in done.stderr
    if to == "/dev/full":
        # Of whichever rank comes first: by that the other may be ended.
        assert re.search("rank [01] prints cannot be passed on: No space left on device", done.stderr)
    if to == "ascii":
        assert done.returncode == 0 and "[rank 1] \\xb5 1 8999\n" in done.stdout


def test_a_slow_reader_gets_all_lines(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHATTER)
    slow = "import sys, time; time.sleep(3); print(len(sys.stdin.readlines()))"
    command = f"{sys.executable} {' '.join(ALL_OUTPUT)} {script} 2>/dev/null | {sys.executable} -c '{slow}'"
    done = subprocess.run(command, shell=True, env=base_environment(), capture_output=True, text=True, timeout=30)
    assert done.stdout == "18000\n", done.stderr


def test_a_launcher_whose_reader_is_stopped_can_be_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHATTER)
    with launched(script, *ALL_OUTPUT, stdout=subprocess.PIPE) as process:  # Which nobody reads.
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        time.sleep(6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5)


STUBBORN = """
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    while not (folder / "there").exists(): time.sleep(0.02)
    sys.exit(3)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "pids").write_text(json.dumps([os.getpid(), child.pid]))
(folder / "there").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_while_ranks_are_being_ended_leaves_none_of_them(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(STUBBORN)
    with launched(script, *LAUNCHER, "--ranks", "2", args=[str(tmp_path)], stderr=subprocess.PIPE) as process:
        assert b"rank 1 exited with code 3" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    family = json.loads((tmp_path / "pids").read_text())
    assert wait_until(lambda: not any(alive(pid) for pid in family), 5)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=lambda n: n.name)
def test_signals_that_the_launcher_is_to_ignore_end_nothing(tmp_path, number):
    """As under nohup, or in the background of a script of the shell."""
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1], 'there').touch()\ntime.sleep(2)")
    ignore = lambda: signal.signal(number, signal.SIG_IGN)  # noqa: E731
    words = [*LAUNCHER, "--ranks", "1"]
    with launched(script, *words, args=[str(tmp_path)], preexec_fn=ignore) as process:
        assert wait_until((tmp_path / "there").exists)
        process.send_signal(number)
        assert process.wait(30) == 0


def test_a_job_outlives_its_reaper(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1], 'there').touch()\ntime.sleep(1)")
    words = [*LAUNCHER, "--ranks", "1"]
    with launched(script, *words, args=[str(tmp_path)], stderr=subprocess.PIPE) as process:
        assert wait_until((tmp_path / "there").exists)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (reaper,) = [pid for pid in children if "orphan_reaper.py" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(reaper), signal.SIGKILL)
        assert process.wait(30) == 0 and process.stderr.read() == b""


@pytest.mark.parametrize("files", range(5, 22))
def test_a_launcher_that_may_open_few_files_says_so(tmp_path, files):
    script = tmp_path / "script.py"
    script.write_text("")
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # noqa: E731
    with launched(script, *ALL_OUTPUT, stderr=subprocess.PIPE, preexec_fn=limit) as process:
        outputs = process.communicate(timeout=30)[1].decode()
    found = re.search(
        r"ArgumentError: (a job|a job of 2 ranks|rank \d of 2) cannot be started: found Too many op", outputs
    )
    assert (process.returncode, outputs) == (0, "") or found


@contextlib.contextmanager
def launched(script, *words, args=(), **options):
    process = subprocess.Popen([sys.executable, *words, str(script), *args], env=base_environment(), **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ranks_listen_on_the_loopback_interface_only(job):
    script = (
        SUM
        + """
import contextlib, os
mine = set()
for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):  # closed by another thread
        mine.add(os.readlink("/proc/self/fd/" + fd))
def listening(path, loopback):
    rows = [line.split() for line in open(path).readlines()[1:]]
    sockets = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    assert all(row[1].split(":")[0] == loopback for row in sockets), sockets
    return len(sockets)
count = listening("/proc/net/tcp", "0100007F") + listening("/proc/net/tcp6", "0" * 24 + "01000000")
assert count >= 1
world.barrier()
print("listening sockets:", count)
"""
    )
    done = job(script, *LAUNCHER, "--ranks", "2")
    assert done.stdout.startswith("listening sockets: "), done.stderr


def test_torchrun(job):
    script = SUM + "world.rank or print(world.place.source, tensor.item())"
    done = job(script, *TORCHRUN, f"--master-port={free_port()}")
    assert (done.returncode, done.stdout) == (0, "torchrun 3.0\n"), done.stderr


def test_torchrun_standalone_restarts(job):
    script = (
        SUM
        + """
import os
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
assert attempt != "0" or world.rank == 0, "first attempt"
world.barrier()
world.rank or print("attempt", attempt, tensor.item())
"""
    )
    done = job(script, *TORCHRUN[:3], "--standalone", "--max-restarts=1")
    assert (done.returncode, done.stdout) == (0, "attempt 1 3.0\n"), done.stderr
    assert "AssertionError: first attempt" in done.stderr


BEFORE = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
AFTER = """
import torch.distributed as dist
dist.is_initialized() or dist.init_process_group("gloo")
dist.all_reduce(tensor)
world.group(world.all_ranks, "all").all_reduce(tensor).wait()
world.rank or print(world.place.source, tensor.item())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("how", ["launcher", "torchrun", "variables"])
def test_the_script_has_a_default_group_too(job, tmp_path, before, how):
    script = (BEFORE if before else "") + SUM + AFTER
    if how == "variables":
        assert run_with_variables(script, tmp_path) == "RANK/WORLD_SIZE 12.0\n"
        return
    torchrun = (*TORCHRUN, f"--master-port={free_port()}")
    done = job(script, *(torchrun if how == "torchrun" else (*LAUNCHER, "--ranks", "2")))
    source = "torchrun" if how == "torchrun" else "meshfuse run"
    assert (done.returncode, done.stdout) == (0, f"{source} 12.0\n"), done.stderr


def run_with_variables(script: str, tmp_path: Path, **extra: str) -> str:
    """Rank 0's output of two ranks that only the variables tell of each other."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    return run_ranks(script, tmp_path, [base_environment(RANK=str(rank), **common, **extra) for rank in range(2)])[0]


def run_ranks(script: str, tmp_path: Path, environments: list[dict[str, str]], *words: str) -> list[str]:
    """The outputs of the ranks, each of which has these variables, and these words and its rank for arguments."""
    path, outputs = tmp_path / "script.py", [tmp_path / f"stdout{rank}" for rank in range(len(environments))]
    path.write_text(script)
    ranks = [
        forked.start(path, env, outputs[rank], errors=tmp_path / f"stderr{rank}", args=(*words, str(rank)))
        for rank, env in enumerate(environments)
    ]
    for rank in ranks:
        rank.join(60)
        rank.kill()
    errors = [(tmp_path / f"stderr{rank}").read_text() for rank in range(len(ranks))]
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks), errors
    return [path.read_text() for path in outputs]


def test_ranks_that_only_the_default_group_knows(tmp_path):
    """As torch.multiprocessing.spawn makes them: no variables, a store of the script's own."""
    script = (
        textwrap.dedent("""
    import sys
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    """)
        + SUM
        + "\nprint(world.place.source, tensor.item())"
    )
    outputs = run_ranks(script, tmp_path, [base_environment()] * 2, str(tmp_path / "store"))
    assert outputs == ["torch.distributed 3.0\n"] * 2


def test_a_default_group_that_renumbers_the_ranks_is_an_error(tmp_path):
    """DTensors go by its numbers, and the job by those that it began with: shards would be taken for other ranks'."""
    script = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import meshfuse as mf

def begin(name, rank):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}{name}", rank=rank, world_size=2)
    return distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])

def done(x):
    with mf.FusionDefinition() as fd:
        fd.add_output(fd.ops.cumsum(fd.from_pytorch(x), 0))
    return fd.execute([x])[0].full_tensor().tolist()

def error_of(call):
    try:
        return call()
    except mf.MeshfuseError as error:
        return error

rank = int(sys.argv[2])
print(done(begin("a", rank)))
dist.destroy_process_group()
print(done(begin("b", rank)))
dist.destroy_process_group()
x = begin("c", 1 - rank)
print(error_of(lambda: done(x)))
print(error_of(lambda: mf.save(sys.argv[1] + "saved", {"x": x})))
"""
    outputs = run_ranks(script, tmp_path, [base_environment()] * 2, str(tmp_path / "store"))
    for rank, lines in enumerate(outputs):
        first, again, *errors = lines.splitlines()
        assert first == again == "[0.0, 1.0, 3.0, 6.0]"
        text = "DTensors go by other numbers of the ranks than this job: "
        text += (
            f"found rank {1 - rank} in torch's default group, needed rank {rank}, as which this process joined the job"
        )
        assert len(errors) == 2 and all(text in error and "(at script.py:" in error for error in errors), lines


def test_ranks_that_know_each_other_after_the_first_use(tmp_path):
    """A script may use meshfuse as one process before it makes the default group, with definitions for one rank."""
    script = """
import sys
import torch
import torch.distributed as dist
import meshfuse as mf

def total(size):
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4])
        fd.add_output(fd.ops.sum(x, [0]))
        fd.mesh_split(x, mf.DeviceMesh((size,), ("tp",)), ["tp"])
    return fd

alone = mf.World.current().size, total(1).execute([torch.ones(4)])[0].item()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
print(*alone, mf.World.current().size, total(2).execute([torch.ones(2)])[0].item())
"""
    outputs = run_ranks(script, tmp_path, [base_environment()] * 2, str(tmp_path / "store"))
    assert outputs == ["1 4.0 2 4.0\n"] * 2


@pytest.mark.parametrize("launcher", ["Open MPI", "Slurm"])
def test_variables_of_other_launchers_are_enough(tmp_path, launcher):
    """No MASTER_ADDR or MASTER_PORT: the job's name gives the port."""
    script = SUM + "print(world.place.source, world.local_rank, tensor.item())"
    of_ranks = [other_variables(launcher, str(rank), f"{os.getpid()}{launcher}") for rank in range(2)]
    outputs = run_ranks(script, tmp_path, [base_environment(**variables) for variables in of_ranks])
    assert outputs == [f"{launcher} {rank} 3.0\n" for rank in range(2)]


def other_variables(launcher: str, rank: str, job_name: str) -> dict[str, str]:
    if launcher == "Slurm":
        return {
            "SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_LOCALID": rank, "SLURM_JOB_ID": job_name,
            "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node1",
        }  # fmt: skip
    return {
        "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": job_name,
    }  # fmt: skip


@pytest.mark.parametrize("interface", ["", "lo"])
def test_ranks_that_may_open_few_files_end_by_an_error_of_ours(job, interface):
    """Torch's own are `Failed to init uv loop` and `Broken pipe`; with fewest of all it aborts."""
    limit = "import os, resource\nmost = len(os.listdir('/proc/self/fd')) + int(os.environ['MORE'])\n"
    limit += "import meshfuse, torch.distributed\nresource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
    done = {
        more: job(
            limit + SUM, *LAUNCHER, "--ranks", "2",
            MORE=str(more), MESHFUSE_TIMEOUT="2", GLOO_SOCKET_IFNAME=interface,
        )
        for more in (4, 12, 15, 16, 60)
    }  # fmt: skip
    assert "rank 0 cannot serve the store of its job: found too many open files, see ulimit -n" in done[4].stderr
    for more in (4, 12, 15, 16):
        assert done[more].returncode and re.search(r"Rank(Error|Timeout): ", done[more].stderr), done[more]
        assert "torch.distributed.Dist" not in done[more].stderr, done[more]
    assert done[60].returncode == 0


def test_an_interface_that_is_not_there(job):
    done = job(SUM, *LAUNCHER, "--ranks", "2", GLOO_SOCKET_IFNAME="none0")
    found = "ArgumentError: GLOO_SOCKET_IFNAME is no interface to connect by: found 'none0' "
    assert done.returncode == 1 and found in done.stderr and "(at script.py:" in done.stderr, done.stderr


def test_one_process_opens_no_socket(job):
    script = """
    import socket, torch
    from meshfuse.runtime import store
    store.connect = None
    from meshfuse.runtime.world import World
    world = World.current()
    group = world.group((0,), "all")
    tensor = torch.ones(3)
    group.all_reduce(tensor).wait()
    world.barrier()
    world.rendezvous.check_same("a", "the program", (0,))
    print(world.rank, world.size, tensor.tolist())
    """
    done = job(script)
    assert done.stdout == "0 1 [1.0, 1.0, 1.0]\n", done.stderr
