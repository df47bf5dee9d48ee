"""What happens to which rank of a job, however it was started, and what the job must say of it."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

RANKS = 3
STALL = 2.0  # MESHFUSE_TIMEOUT of what stalls, in seconds
RUN, TORCHRUN, DEFAULT = "run", "torchrun", "default group"
MODES = (RUN, TORCHRUN, DEFAULT)

START = """
import contextlib, faulthandler, os, signal, sys, threading, time
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
    part = path + ".part" + str(os.getpid())  # two processes may be one rank
    with open(part, "w") as file:
        file.write(text)
    os.rename(part, path)

def sockets():
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed by another thread
            links.append(os.readlink("/proc/self/fd/" + fd))
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
    others: dict[int, dict[str, str]] = field(default_factory=dict)  # variables of single ranks that differ

    def __str__(self) -> str:
        return f"{self.name} [{self.mode}]"


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
        # A peer says it, or the store's end, or torchrun, on two lines.
        torchruns = r"rank +: {victim} \(local_rank: {victim}\)\s+exitcode +: -9"
        says = (rf"rank {{victim}}\b.*(killed|has ended|-9|Signal 9)|store|{torchruns}",)
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
    for kind, name in (("that is not there", "no.such.host.invalid"), ("that is no name", ".cluster.local")):
        messages, address = (f"the address of rank 0 cannot be looked up: found {name}",), {"MASTER_ADDR": name}
        yield Fault(f"an address {kind}", "variables", absent, messages, env=limit | address)
    messages = ("ranks disagree on the size of their world",)
    yield Fault(
        "another world size", "variables", absent, messages, stall=STALL, env=limit, others={1: {"WORLD_SIZE": "4"}}
    )
    messages = ("two processes are rank 1 of this job",)
    yield Fault("two of one rank", "variables", absent, messages, stall=STALL, env=limit, others={2: {"RANK": "1"}})


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
