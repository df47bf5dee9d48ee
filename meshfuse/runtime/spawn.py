"""Ranks as processes of this machine: what their launcher starts them with. Imports no torch."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from ..errors import USER_ERRORS, ArgumentError, user_error
from . import exit_page
from .environment import LOOPBACK
from .exit_hooks import FOLLOWER
from .output import Forwarder, say
from .processes import die_with_parent

# Exit codes of ranks that end because of others (`exit_hooks.FOLLOWER`): numbers that scripts seldom use.
FOLLOWER_CODE, WAITED_CODE = 117, 118


@dataclass(slots=True)
class RankProcess:
    """A started rank; its pid is also its process group's."""

    rank: int
    process: subprocess.Popen[bytes]
    readers: list[Forwarder] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What all attempts of a job share; `deadline` is a `time.monotonic()`."""

    ranks: int
    argv: list[str]
    max_restarts: int
    deadline: float | None
    all_output: bool


@contextmanager
def startable(what: str) -> Iterator[None]:
    """Raises ArgumentError where this machine does not let `what` be started."""
    try:
        yield
    except USER_ERRORS:
        raise
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise user_error(
            f"{what} cannot be started",
            getattr(error, "strerror", None) or str(error),
            "room for its process, and a script's words that it can be given",
            "Start fewer ranks, or raise the limits that ulimit -a shows.",
            cls=ArgumentError,
        ) from None


def listening() -> socket.socket:
    """A listening socket at a free port, to which only processes of this machine can connect."""
    return socket.create_server((LOOPBACK, 0), backlog=512)


def _free_port() -> int:
    with listening() as probe:
        return probe.getsockname()[1]


def job_variables(job: JobSpec, attempt: int, store_port: int, page: int | None) -> dict[str, str]:
    """torchrun's variables, and a store of meshfuse's own beside MASTER_PORT, the script's."""
    variables = dict(os.environ)
    variables.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    variables.setdefault("OMP_NUM_THREADS", "1")
    # When the rank that serves the store dies, torch logs C++ stacks in all others, on top of the error itself.
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return variables | {
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(_free_port()),
        "MESHFUSE_STORE_PORT": str(store_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        exit_page.VARIABLE: "" if page is None else str(page),
        FOLLOWER: str(FOLLOWER_CODE),
    }


def start(
    rank: int,
    job: JobSpec,
    base: Mapping[str, str],
    listener: socket.socket,
    page: int | None,
    started: list[RankProcess],
) -> None:
    """Start a rank and append it to `started`."""
    variables = dict(base) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    handed = () if page is None else (page,)
    if rank == 0:
        variables["MESHFUSE_STORE_FD"] = str(listener.fileno())
        handed = (*handed, listener.fileno())
    # Rank 0 writes for itself, but where others' lines would come into the middle of its own (PYTHONUNBUFFERED).
    direct = rank == 0 and (not job.all_output or sys.stdout is None or sys.stdout.isatty())
    with startable(f"rank {rank} of {job.ranks}"):
        process = subprocess.Popen(
            [sys.executable, *job.argv],
            env=variables,
            pass_fds=handed,
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=None if direct else _pipe_to(sys.stdout if job.all_output else None),
            stderr=None if rank == 0 else _pipe_to(sys.stderr),
            start_new_session=True,
            preexec_fn=_bound_to_launcher(),
        )
        started.append(RankProcess(rank, process))
        for pipe, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None and out is not None:
                started[-1].readers.append(Forwarder(rank, pipe, out, functools.partial(_refused, rank)))


def _pipe_to(out: TextIO | None) -> int:
    return subprocess.DEVNULL if out is None else subprocess.PIPE


def _refused(rank: int, why: str) -> None:
    say(f"what rank {rank} prints cannot be passed on: {why}")


def _bound_to_launcher() -> Callable[[], None] | None:
    """What a child calls before exec so that the kernel kills it when the launcher dies; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
