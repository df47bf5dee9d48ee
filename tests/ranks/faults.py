"""Faults of real jobs: what happens to a rank, how the job was started, and what must be left of it: nothing.

`python tests/ranks/faults.py --repeat 20 [NAME ...]` (or `make faults REPEAT=20`) runs each many times and prints a
table; test_faults.py runs each once. Every job is followed by a healthy one in the same place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import forked
from rank_pool import alive, base_environment, free_port

RANKS = 3
GUARD = 60.0
STALL = 2.0  # MESHFUSE_TIMEOUT of what stalls, in seconds
BOUND = 5.0
RUN, TORCHRUN, DEFAULT = "run", "torchrun", "default group"
MODES = (RUN, TORCHRUN, DEFAULT)

START = """
import faulthandler, os, signal, sys, threading, time
import torch
faulthandler.dump_traceback_later(20)
if {default}:
    import datetime
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=50))
    # torch's own meeting is no part of the test: a rank that dies there leaves the others to torch's time limit.
    torch.distributed.barrier()
import meshfuse as mf
torch.set_num_threads(1)
FOLDER, VICTIM = {folder!r}, {victim}
RANK = int(os.environ["RANK"])

def note(name, text=""):
    path = os.path.join(FOLDER, name)
    with open(path + ".part", "w") as file:
        file.write(text)
    os.rename(path + ".part", path)

def sockets():
    fds = ["/proc/self/fd/" + fd for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(fd) for fd in fds if os.path.lexists(fd)]
    return " ".join(link[8:-1] for link in links if link.startswith("socket:"))

def fault():
    note(f"fault{{RANK}}", repr(time.time()))

def signalled(number):
    fault()
    os.kill(os.getpid(), number)

def await_fault():
    while not os.path.exists(os.path.join(FOLDER, f"fault{{VICTIM}}")):
        time.sleep(0.02)
    time.sleep(0.1)

note(f"rank{{RANK}}", str(os.getpid()))
"""

PROGRAM = """
world = mf.World.current()
mesh = mf.DeviceMesh((world.size,), ("tp",))

def define(rows, more=lambda fd, y: y):
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([rows, 3072])
        w = fd.define_tensor([512, 3072])
        y = fd.ops.linear(x, w)
        fd.add_output(more(fd, y))
        fd.mesh_split(x, mesh, [None, "tp"])
        fd.mesh_split(w, mesh, [None, "tp"])
    return fd

light, heavy = define(8), define(4096)
given = {fd: [torch.ones(rows, 1024), torch.ones(512, 1024)] for fd, rows in ((light, 8), (heavy, 4096))}
"""

STEPS = """
program = heavy if "{phase}" == "compute" else light
program.execute(given[program])
note(f"sockets{{RANK}}", sockets())
world.barrier()
step = 1
while True:
    step += 1
    if step == 3:
        world.limit = {limit}
        {action}
    program.execute(given[program])
"""

HEALTHY = PROGRAM + "\nlight.execute(given[light])\nworld.barrier()\nnote(f'sockets{RANK}', sockets())\n"


@dataclass(frozen=True)
class Fault:
    """One way to fail. `script` follows START; `says` must all be in what the job prints."""

    name: str
    mode: str
    script: str
    says: tuple[str, ...] = ()
    stall: float = 0.0
    code: str = "bad"  # "bad": not 0; "others": those of the others are not 0; "any"
    dies: bool = False  # whether the victim is killed, and so says nothing itself
    stops: bool = False
    outside: int = 0  # a signal to the launcher
    again: bool = False  # the signal comes a second time
    ranks_started: int = RANKS
    port_taken: bool = False
    env: dict[str, str] = field(default_factory=dict)
    others: dict[int, dict[str, str]] = field(default_factory=dict)  # what single ranks are told otherwise

    def __str__(self) -> str:
        return f"{self.name} [{self.mode}]"


@dataclass
class Outcome:
    """What was left of a job: seconds from the fault to the end of the survivors, and what was wrong."""

    seconds: float
    problems: list[str]
    log: str


LINE = r"script\.py:\d+"
COLLECTIVE = r"all-reduce of y \(t2\) over tp \(.*\).*"


def _steps(phase: str, action: str, limit: float = 50.0) -> str:
    return PROGRAM + STEPS.format(phase=phase, action=action, limit=limit)


def _signal_action(phase: str, name: str) -> str:
    if phase == "between":
        return f"RANK == VICTIM and signalled(signal.{name})"
    if phase == "compute":
        return f"RANK == VICTIM and threading.Timer(0.03, signalled, (signal.{name},)).start()"
    return f"threading.Timer(0.3, signalled, (signal.{name},)).start() if RANK == VICTIM else await_fault()"


def _deaths() -> Iterator[Fault]:
    for mode in MODES:
        for phase in ("compute", "collective", "between"):
            # While it computes the victim may get a step further before it dies.
            says = (r"(in|after) step \d", LINE, r"rank {victim}\b.*(killed|has ended|-9|Signal 9)")
            yield Fault(f"SIGKILL in {phase}", mode, _steps(phase, _signal_action(phase, "SIGKILL")), says, dies=True)
            says = (
                COLLECTIVE + r"in step \d",
                LINE,
                r"rank {victim} does not answer: its process \d+ is stopped|its process \d+ is stopped",
            )
            script = _steps(phase, _signal_action(phase, "SIGSTOP"), STALL)
            yield Fault(f"SIGSTOP in {phase}", mode, script, says, stall=STALL, stops=True)


def _raises() -> Iterator[Fault]:
    action = "RANK == VICTIM and (fault(), {}['the mistake'])"
    for mode in MODES:
        says = ("KeyError: 'the mistake'", "(in|after) step [23]", LINE)
        yield Fault("raise in user code", mode, _steps("between", action), says)


ODD = """
class Odd(Exception):
    def __str__(self): raise RuntimeError('no text')
    def __reduce__(self): raise RuntimeError('no pickle')

def odd(kind):
    raise {'no text': Odd(), 'long': ValueError('x' * 3_000_000), 'surrogate': ValueError('\\udcff \\0 \\x1b'),
           'interrupt': KeyboardInterrupt(), 'chain': ExceptionGroup('many', [Odd(), OSError(5, 'five')])}[kind]
"""
ENDLESS_THREAD = "threading.Thread(target=lambda: time.sleep(600)).start()\n"


def _odd_ends() -> Iterator[Fault]:
    """Ranks that end in unusual ways."""
    kinds = {
        "no text": "Odd",
        "long": "xxx",
        "surrogate": r"\\udcff",
        "interrupt": "Keyboard",
        "chain": "Exception ?Group",
    }
    for mode in (RUN, DEFAULT):
        for kind, text in kinds.items():
            script = ODD + _steps("between", f"RANK == VICTIM and (fault(), odd({kind!r}))")
            yield Fault(f"raise {kind}", mode, script, (text, "(in|after) step [23]"))
        script = ENDLESS_THREAD + _steps("between", "RANK == VICTIM and (fault(), {}['the mistake'])")
        yield Fault("raise beside an endless thread", mode, script, ("KeyError: 'the mistake'",))
    for mode in MODES:
        for call, says in {
            "sys.exit(0)": r"rank {victim} has (finished|ended)|lost its peers",
            "sys.exit(4)": r"rank {victim}\b.*(exited with code 4|has (finished|ended))|exitcode *: 4|\(exitcode: 4\)",
            "os._exit(0)": r"rank {victim}\b.*has ended|lost its peers",
            "os._exit(3)": r"rank {victim}\b.*(exited with code 3|has ended)|exitcode *: 3|\(exitcode: 3\)",
        }.items():
            script = _steps("between", f"RANK == VICTIM and (fault(), {call})")
            yield Fault(call, mode, script, (says,), code="others")
        # The others wait in the store, which the victim may be the one to serve.
        script = PROGRAM + "\nlight.execute(given[light])\nif RANK == VICTIM:\n    fault()\n    sys.exit(0)\n"
        says = (r"barrier .*rank {victim}\b",)
        yield Fault("sys.exit(0) before a meeting", mode, script + "world.barrier()\n", says, code="others")


def _several() -> Iterator[Fault]:
    """Two of three ranks at once, and ranks that die before the others have met them."""
    both = "if RANK in (VICTIM, (VICTIM + 1) % 3): {}\n        else: await_fault()"
    for mode in MODES:
        for phase, action in {
            "in a collective": both.format("threading.Timer(0.3, signalled, (signal.SIGKILL,)).start()"),
            "between steps": both.format("signalled(signal.SIGKILL)"),
        }.items():
            says = (r"ranks? .*(killed|has ended|-9|Signal 9)",)
            yield Fault(f"SIGKILL of two ranks {phase}", mode, _steps("collective", action), says, dies=True)
        kill = "\nworld = mf.World.current()\nif RANK == VICTIM:\n    signalled(signal.SIGKILL)\n"
        script = kill + PROGRAM + "\nlight.execute(given[light])\nworld.barrier()\n"
        says = (r"rank {victim}\b.*(killed|has ended|-9|Signal 9)|store",)
        # Without a launcher a rank 0 that is not there yet is told from one that is no more by the time limit only.
        stall = STALL if mode == DEFAULT else 0.0
        env = {"MESHFUSE_TIMEOUT": str(STALL)} if stall else {}
        yield Fault("SIGKILL in the rendezvous", mode, script, says, dies=True, stall=stall, env=env)
    kill = "\nif RANK == VICTIM:\n    signalled(signal.SIGKILL)\n"
    script = kill + PROGRAM + "\nlight.execute(given[light])\nworld.barrier()\n"
    for mode in (RUN, TORCHRUN):
        says = (r"rank {victim}\b.*(killed|has ended|-9|Signal 9)|\(local_rank: {victim}\)",)
        yield Fault("SIGKILL before it has joined", mode, script, says, dies=True)
    says = ("rank {victim} has not joined|cannot reach the store",)
    limit = {"MESHFUSE_TIMEOUT": str(STALL)}
    yield Fault("SIGKILL before it has joined", "variables", script, says, stall=STALL, env=limit, dies=True)


DIFFERENT = {
    "definition": """
        other = define(8, (lambda fd, y: fd.ops.relu(y)) if RANK == VICTIM else (lambda fd, y: y))
        fault()
        other.execute([torch.ones(8, 1024), torch.ones(512, 1024)])
    """,
    "shapes": """
        with mf.FusionDefinition() as other:
            x = other.define_tensor([-1, 16])
            y = other.ops.sum(x, [1])
            other.add_output(y)
            other.mesh_split(x, mesh, [None, "tp"])
        fault()
        other.execute([torch.ones(5 if RANK == VICTIM else 4, *other_cols())])
    """,
    "first order of calls": """
        fault()
        for fd in (light, heavy) if RANK == VICTIM else (heavy, light):
            fd.execute(given[fd])
    """,
    "later order of calls": """
        for fd in (light, heavy):
            fd.execute(given[fd])
        world.barrier()
        world.limit = 2.0
        fault()
        for step in range(4):
            for fd in (light, heavy) if RANK == VICTIM else (heavy, light):
                fd.execute(given[fd])
    """,
}


def _disagreements() -> Iterator[Fault]:
    columns = "other_cols = lambda: [len(range(RANK * 6, min(16, RANK * 6 + 6)))]\n"
    for mode in MODES:
        for what, script in DIFFERENT.items():
            says = {"later order of calls": "ranks disagree on the order of calls|timed out on rank|in step"}
            text = says.get(what, r"ranks disagree on the program: found (ranks? [\d, ]+ '.*'(; )?)+")
            stall = STALL if what.startswith("later") else 0.0
            yield Fault(f"other {what}", mode, PROGRAM + columns + textwrap.dedent(script), (text,), stall=stall)


def _strangers() -> Iterator[Fault]:
    sleeper = "\nif RANK == VICTIM:\n    time.sleep(600)\nfault()\n" + PROGRAM + "\nlight.execute(given[light])\n"
    absent = "\nfault()\n" + PROGRAM + "\nlight.execute(given[light])\n"
    limit = {"MESHFUSE_TIMEOUT": str(STALL)}
    for mode in (RUN, TORCHRUN):
        says = ("rank {victim} has not joined|cannot reach the store",)
        yield Fault("a peer that never connects", mode, sleeper, says, stall=STALL, env=limit)
    says = ("rank 2 has not joined",)
    yield Fault("a peer that never connects", "variables", absent, says, stall=STALL, env=limit, ranks_started=2)
    says = (
        r"rank 0 cannot serve the store of its job: found 127.0.0.1:\d+ unusable",
        "cannot reach the store of its job|cannot finish|timed out",
    )
    yield Fault("port in use", "variables", absent, says, stall=STALL, env=limit, port_taken=True)
    said = ("the address of rank 0 cannot be looked up: found no.such.host.invalid",)
    address = {"MASTER_ADDR": "no.such.host.invalid"}
    yield Fault("an address that is not there", "variables", absent, said, env=limit | address)
    said = ("ranks disagree on the size of their world",)
    yield Fault(
        "another world size", "variables", absent, said, stall=STALL, env=limit, others={1: {"WORLD_SIZE": "4"}}
    )
    said = ("two processes are rank 1 of this job",)
    yield Fault("two of one rank", "variables", absent, said, stall=STALL, env=limit, others={2: {"RANK": "1"}})


def _launchers() -> Iterator[Fault]:
    endless = _steps("collective", "note(f'ready{RANK}') or RANK == VICTIM and time.sleep(600)")
    for mode in (RUN, TORCHRUN):
        says = ("SIGINT|Signal(s)? 2|KeyboardInterrupt",)
        yield Fault("Ctrl-C on the launcher", mode, endless, says, outside=signal.SIGINT, code="any")
        yield Fault("Ctrl-C twice", mode, endless, says, outside=signal.SIGINT, code="any", again=True)
        yield Fault("SIGTERM of the launcher", mode, endless, (), outside=signal.SIGTERM, code="any")
        yield Fault("SIGKILL of the launcher", mode, endless, (), outside=signal.SIGKILL, code="any")
        early = "\nnote(f'ready{RANK}')\n" + PROGRAM + "\nlight.execute(given[light])\ntime.sleep(600)\n"
        yield Fault("SIGKILL of the launcher at the start", mode, early, (), outside=signal.SIGKILL, code="any")
    yield Fault("SIGHUP of the launcher", RUN, endless, ("SIGHUP",), outside=signal.SIGHUP, code="any")


FAULTS = [
    *_deaths(), *_raises(), *_odd_ends(), *_several(), *_disagreements(), *_strangers(), *_launchers(),
]  # fmt: skip


class Job:
    """One run of a fault in a folder of its own."""

    def __init__(self, fault: Fault, folder: Path, victim: int, real: bool = False):
        self.fault, self.folder, self.victim, self.real = fault, folder, victim, real
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.log = folder / "log"
        self.log.touch()
        self.port = free_port()
        self.processes: list[Any] = []

    def run(self, script: str, healthy: bool = False) -> None:
        """Start the job; returns at once."""
        path = self.folder / "script.py"
        default = self.fault.mode == DEFAULT
        path.write_text(START.format(folder=str(self.folder), victim=self.victim, default=default) + script)
        env = base_environment(
            TMPDIR=str(self.temporary), TORCH_CPP_LOG_LEVEL="ERROR",
            **({"MESHFUSE_TIMEOUT": "50"} | ({} if healthy else self.fault.env)),
        )  # fmt: skip
        if self.fault.mode in (RUN, TORCHRUN):
            self.processes = [self._launch(path, env)]
        else:
            size = RANKS if healthy else self.fault.ranks_started
            env = {"MASTER_ADDR": "127.0.0.1"} | env | {"WORLD_SIZE": str(RANKS), "MASTER_PORT": self.port}
            others = {} if healthy else self.fault.others
            told = [env | {"RANK": str(rank)} | others.get(rank, {}) for rank in range(size)]
            self.processes = [forked.start(path, variables, self.log) for variables in told]

    def _launch(self, path: Path, env: dict[str, str]) -> Any:
        if self.fault.mode == RUN:
            words = ["--ranks", str(RANKS), str(path)]
            return forked.start_job("run", words, env, self.log)
        words = [f"--nproc-per-node={RANKS}", "--master-addr=127.0.0.1", f"--master-port={self.port}", str(path)]
        return forked.start_job("torchrun", words, env, self.log)

    def notes(self, name: str) -> dict[int, str]:
        """What the ranks wrote under a name."""
        found = {}
        for rank in range(RANKS):
            path = self.folder / f"{name}{rank}"
            if path.exists():
                found[rank] = path.read_text()
        return found

    def wait_for(self, condition: Any, limit: float = GUARD) -> bool:
        until = time.monotonic() + limit
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def ended(self) -> bool:
        """Whether all that must end by itself has."""
        there = len(self.notes("rank")) == (RANKS if self.fault.mode in MODES else self.fault.ranks_started)
        if not there and any(process.exitcode is None for process in self.processes):
            return False  # It has not come so far as to be seen.
        if not self.fault.stops:
            return not living_in(self.folder)
        ranks = [int(pid) for rank, pid in self.notes("rank").items() if rank != self.victim]
        return not any(map(alive, ranks))

    def end(self) -> None:
        for process in self.processes:
            process.join(0.0)
        for pid in living_in(self.folder):
            with_no_error(os.kill, pid, signal.SIGKILL)
        self.wait_for(lambda: not living_in(self.folder))
        for process in self.processes:
            process.join(10)

    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]


def once(fault: Fault, victim: int, real: bool = False) -> Outcome:
    """Run a fault and look at what it leaves."""
    with tempfile.TemporaryDirectory(prefix="meshfuse-fault-") as name:
        job = Job(fault, Path(name), victim, real)
        with _taken(job.port if fault.port_taken else None):
            job.run(fault.script)
            seconds, problems = _see_through(job)
        job.end()
        problems += _leftovers(job)
        log = job.log.read_text()
        problems += _unsaid(fault, victim, log)
        problems += _next_job(fault, Path(name), job.port)
        return Outcome(seconds, problems, log)


def _see_through(job: Job) -> tuple[float, list[str]]:
    fault = job.fault
    if fault.outside:
        if not job.wait_for(lambda: len(job.notes("ready")) == RANKS):
            return GUARD, ["the job did not start"]
        began = time.time()
        _signal_launcher(job)
    elif not job.wait_for(lambda: job.notes("fault") or job.ended()):
        return GUARD, ["the fault did not come"]
    if not job.wait_for(job.ended):
        return GUARD, [f"hung: {[_command(pid) for pid in living_in(job.folder)]}"]
    ended = time.time()
    if not fault.outside:
        times = [float(text) for text in job.notes("fault").values()]
        began = max(times) if times else ended
    problems = []
    if fault.stops and fault.mode == RUN and not job.wait_for(lambda: not living_in(job.folder), 15):
        problems.append("the launcher left the stopped rank")
    return ended - began, problems + _wrong_codes(job)


def _signal_launcher(job: Job) -> None:
    with_no_error(os.kill, job.processes[0].pid, job.fault.outside)
    if job.fault.again:
        time.sleep(0.05)
        with_no_error(os.kill, job.processes[0].pid, job.fault.outside)


def _wrong_codes(job: Job) -> list[str]:
    """A failed job must say so by its exit code, or by those of its ranks where it has no launcher."""
    if job.fault.code == "any" or job.fault.stops:
        return []
    for process in job.processes:
        process.join(5)
    excused = job.victim if job.fault.code == "others" and job.fault.mode == DEFAULT else None
    wrong = not all(code for rank, code in enumerate(job.codes()) if rank != excused)
    return [f"exit codes {job.codes()}"] if wrong else []


def _unsaid(fault: Fault, victim: int, log: str) -> list[str]:
    return [f"not said: {text}" for text in fault.says if not re.search(text.replace("{victim}", str(victim)), log)]


def _leftovers(job: Job) -> list[str]:
    inodes = {inode for text in job.notes("sockets").values() for inode in text.split()}
    # The kernel closes the sockets of an ended process a moment after its other traces are gone.
    job.wait_for(lambda: not any(line.split()[9] in inodes for line in open_sockets()), 2.0)
    problems = [f"socket left: {line}" for line in open_sockets() if line.split()[9] in inodes]
    pids = set(job.notes("rank").values())
    shared = [name for name in os.listdir("/dev/shm") if any(pid in re.findall(r"\d+", name) for pid in pids)]
    problems += [f"/dev/shm/{name} left" for name in shared]
    # torchrun keeps a folder for logs, and torch's import one of its own, whoever runs under it.
    own = [p.name for p in job.temporary.iterdir() if not p.name.startswith(("torchelastic_", "torchinductor_"))]
    return problems + [f"{name} left in the folder for temporary files" for name in own]


def _next_job(fault: Fault, folder: Path, port: str) -> list[str]:
    after = folder / "next"
    after.mkdir()
    job = Job(fault, after, 0)
    job.port = port
    job.run(HEALTHY, healthy=True)
    done = job.wait_for(lambda: None not in job.codes() and not living_in(job.folder))
    job.end()
    if not done or any(job.codes()):
        return [f"the next job failed: {job.codes()} {job.log.read_text()[-1500:]}"]
    return []


def living_in(folder: Path) -> list[int]:
    """The live processes whose working directory this is: those of one job, whatever became of their parents."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and alive(int(name)):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/cwd") == str(folder):
                    found.append(int(name))
    return found


def open_sockets() -> list[str]:
    """Lines of /proc/net/tcp of sockets that listen or are connected."""
    lines = [line for path in ("/proc/net/tcp", "/proc/net/tcp6") for line in Path(path).read_text().splitlines()[1:]]
    return [line for line in lines if line.split()[3] in ("01", "0A")]


def with_no_error(call: Any, *args: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        call(*args)


def _command(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().split()[2]} {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return str(pid)


class _taken:
    """A stranger that listens on a port, if one is given."""

    def __init__(self, port: str | None):
        self._port = port

    def __enter__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", int(self._port))) if self._port else None

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--logs", type=Path, help="keep the output of what went wrong here")
    parser.add_argument("--exact", action="store_true", help="NAMES are whole ones")
    parser.add_argument("names", nargs="*", help="only faults with one of these texts in their name")
    args = parser.parse_args(argv)
    names = set(args.names)
    chosen = [f for f in FAULTS if not names or (str(f) in names if args.exact else any(n in str(f) for n in names))]
    if args.list:
        print("\n".join(map(str, chosen)))
        return 0
    bad, table = 0, []
    for fault in chosen:
        outcomes = [once(fault, repeat % RANKS) for repeat in range(args.repeat)]
        failed = [outcome for outcome in outcomes if outcome.problems or outcome.seconds > BOUND + fault.stall]
        times = sorted(outcome.seconds for outcome in outcomes)
        late = sum(not outcome.problems for outcome in failed)
        print(
            f"{fault!s:<44} {len(outcomes)} runs, {len(failed) - late} bad, {late} late;"
            f" seconds {times[len(times) // 2]:.1f} median, {times[-1]:.1f} most", flush=True,
        )  # fmt: skip
        for number, outcome in enumerate(failed):
            print(f"    {outcome.problems}", flush=True)
            if args.logs:
                (args.logs / f"{str(fault).replace(' ', '-')}.{number}.log").write_text(outcome.log)
        bad += len(failed)
        table.append({"fault": str(fault), "times": times, "bad": len(failed) - late, "late": late})
    if args.json:
        args.json.write_text(json.dumps(table))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
