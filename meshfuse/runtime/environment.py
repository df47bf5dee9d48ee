"""Which rank this process is, as its launcher says it in environment variables."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ArgumentError, user_error

DEFAULT_TIMEOUT = 60.0
LONGEST_TIMEOUT = 1e9  # 30 years; clocks and locks overflow beyond 1e10
LOOPBACK = "127.0.0.1"
DEFAULT_GROUP = "torch.distributed"
TORCHRUN = "torchrun"


_MOST_RANKS = 1 << 20
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, slots=True)
class Environment:
    """One process's place among its peers, and where their store is.

    source: the launcher's name.
    agent_store: whether torchrun's agent already serves a store at `address:port`.
    listen_fd: a listening socket that `meshfuse run` gave to rank 0.
    own_address: where this rank's peers reach it; "" for loopback on one machine, else as its host name says.
    attempt: differs between the restarts of one job; `restarts` counts them.
    """

    source: str = "none"
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = LOOPBACK
    port: int = 0
    attempt: str = "0"
    restarts: int = 0
    agent_store: bool = False
    listen_fd: int | None = None
    own_address: str = ""

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on this machine, so that they can talk over the loopback interface."""
        return self.local_size == self.size

    def __post_init__(self) -> None:
        check = "Check the launcher's variables (RANK and WORLD_SIZE, or its own)."
        if not 1 <= self.size <= _MOST_RANKS:
            needed = f"1 to {_MOST_RANKS}"
            raise user_error(
                f"the size of the world by {self.source}", str(self.size), needed, check, cls=ArgumentError
            )
        if not 0 <= self.rank < self.size:
            raise user_error(
                f"the rank that {self.source} gives is not in its world",
                f"rank {self.rank} of {self.size}",
                f"a rank from 0 to {self.size - 1}",
                check,
                cls=ArgumentError,
            )
        if self.size > 1 and self.source not in (DEFAULT_GROUP, "none") and not 0 < self.port < 65536:
            raise user_error(
                "the port of the job's store is none", str(self.port), "1 to 65535",
                "Export another MASTER_PORT to all ranks.", cls=ArgumentError,
            )  # fmt: skip


def read_environment(env: Mapping[str, str] = os.environ) -> Environment:
    """The place that torchrun, `meshfuse run`, Open MPI or Slurm gave this process; else rank 0 of 1.

    Raises ArgumentError for variables that are incomplete or no numbers.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun(env)
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _open_mpi(env)
    if _in_slurm_step(env):
        return _slurm(env)
    return Environment()


def time_limit(env: Mapping[str, str] = os.environ) -> float:
    """MESHFUSE_TIMEOUT in seconds: the limit of every wait for a peer. Raises ArgumentError where it is no time."""
    text = env.get("MESHFUSE_TIMEOUT", "") or str(DEFAULT_TIMEOUT)
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 0 < limit <= LONGEST_TIMEOUT:
        raise user_error(
            "MESHFUSE_TIMEOUT is no time", repr(text), f"a number of seconds above 0, at most {LONGEST_TIMEOUT:g}",
            "Unset it for 60 s.", cls=ArgumentError,
        )  # fmt: skip
    return limit


def _torchrun(env: Mapping[str, str]) -> Environment:
    size = _number(env, "WORLD_SIZE")
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A torchrun inside of a rank of `meshfuse run` gives its ranks that one's variables, too.
    ours = "MESHFUSE_STORE_PORT" in env and not agent
    return Environment(
        source="meshfuse run" if ours else TORCHRUN if "TORCHELASTIC_RUN_ID" in env else "RANK/WORLD_SIZE",
        rank=_number(env, "RANK"),
        size=size,
        local_rank=_number(env, "LOCAL_RANK", _number(env, "RANK")),
        local_size=_number(env, "LOCAL_WORLD_SIZE", size),
        address=LOOPBACK if ours else env.get("MASTER_ADDR", LOOPBACK),
        port=_number(env, "MESHFUSE_STORE_PORT") if ours else _port(env),
        attempt=f"{env.get('TORCHELASTIC_RUN_ID', 'job')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        restarts=_number(env, "TORCHELASTIC_RESTART_COUNT", 0),
        agent_store=agent,
        listen_fd=_number(env, "MESHFUSE_STORE_FD") if ours and env.get("MESHFUSE_STORE_FD") else None,
    )


def _open_mpi(env: Mapping[str, str]) -> Environment:
    size = _number(env, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    return Environment(
        source="Open MPI",
        rank=_number(env, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_size=local_size,
        address=_address(env, local_size == size, hosts=""),
        port=_port(env),
    )


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    # A batch or interactive shell has SLURM_PROCID=0 and SLURM_NTASKS=n too, but it is one process: only
    # srun's tasks have a step.
    shell = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env
    return "SLURM_PROCID" in env and "SLURM_NTASKS" in env and not shell


def _slurm(env: Mapping[str, str]) -> Environment:
    size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS"))
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or str(size)
    leading = re.match(r"\d+", tasks)
    local_size = min(int(leading.group()), size) if leading else size
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    return Environment(
        source="Slurm",
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_size=local_size,
        address=_address(env, local_size == size, hosts),
        port=_port(env),
    )


def _address(env: Mapping[str, str], one_host: bool, hosts: str) -> str:
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"]
    if one_host:
        return LOOPBACK
    if hosts:
        return first_host(hosts)
    raise user_error(
        "ranks on several hosts need the address of rank 0's", "no MASTER_ADDR", "its name or IP address",
        "Export MASTER_ADDR (and MASTER_PORT) to all ranks.", cls=ArgumentError,
    )  # fmt: skip


def first_host(hosts: str) -> str:
    """The first name of Slurm's host list: `node[03-07,9],login` is node03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", hosts)
    return (match.group(1) + (match.group(2) or "")) if match else hosts


def _port(env: Mapping[str, str]) -> int:
    if "MASTER_PORT" in env:
        return _number(env, "MASTER_PORT")
    job = env.get("SLURM_JOB_ID") or env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    step = env.get("SLURM_STEP_ID", "")
    # Below the ephemeral range, and different for the jobs of one machine.
    return 20000 + zlib.crc32(f"{job}.{step}".encode()) % 10000


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise user_error(
            f"the environment variable {name} is no number",
            "nothing" if text is None else repr(text),
            "a number, as torchrun and meshfuse run set it",
            "Start the script with `meshfuse run --ranks N`, or unset RANK and WORLD_SIZE for one process.",
            cls=ArgumentError,
        ) from None


def interface_of(address: str) -> str:
    """The network interface of this machine that has an IPv4 address; "" where none has (Linux)."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wanted = socket.inet_aton(address)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == wanted:
                    return name
    return ""
