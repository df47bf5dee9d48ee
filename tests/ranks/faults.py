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
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import forked
from fault_kinds import DEFAULT, FAULTS, HEALTHY, MODES, RANKS, RUN, START, TORCHRUN, Fault
from rank_pool import alive, base_environment, free_port

GUARD = 60.0
BOUND = 5.0


@dataclass
class Outcome:
    """What was left of a job: seconds from the fault to the end of the survivors, and what was wrong."""

    seconds: float
    problems: list[str]
    log: str


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
            environments = [env | {"RANK": str(rank)} | others.get(rank, {}) for rank in range(size)]
            self.processes = [forked.start(path, variables, self.log) for variables in environments]

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
            time.sleep(0.05)
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


# torchrun signals a rank that has ended meanwhile, and fails itself where it would name the rank that failed first.
_TORCHRUNS_OWN = re.compile(r"subprocess_handler\.py\", line \d+, in close\n.*killpg.*\n(.*\n)?\s*ProcessLookupError")
_TRIES = 3


def once(fault: Fault, victim: int, real: bool = False) -> Outcome:
    """Run a fault and look at what it leaves; again where torchrun has failed by a race of its own."""
    for _ in range(_TRIES):
        outcome = _tried(fault, victim, real)
        if not (outcome.problems and fault.mode == TORCHRUN and _TORCHRUNS_OWN.search(outcome.log)):
            break
    return outcome


def _tried(fault: Fault, victim: int, real: bool) -> Outcome:
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
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/cwd") == str(folder):
                    found.append(int(name))
    return [pid for pid in found if alive(pid)]


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
