"""The machine of a mesh of which no links are given.

MESHFUSE_LINKS names one of `costs.MACHINES`; else it is the host as `meshfuse doctor --links` measured it, which is
kept on disk; else a common one, DGX H100.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path

from .costs import DGX_H100, MACHINES, Link, Machine
from .disk_cache import root_folder
from .errors import MeshfuseError, shown, user_error
from .whole_files import write_whole

VARIABLE = "MESHFUSE_LINKS"
COMMON = DGX_H100
# How launchers say how many ranks there are, and how many of them on this host.
_SIZES = (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
          ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"))  # fmt: skip


def default_machine() -> Machine:
    """The machine of a mesh without links.

    Raises DefinitionError where MESHFUSE_LINKS names none.
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return _measured_here() or COMMON
    if name not in MACHINES:
        raise user_error(VARIABLE, shown(name), f"one of {', '.join(map(repr, MACHINES))}", "'bytes' has bytes decide.")
    return MACHINES[name]


def name_of(machine: Machine) -> str:
    """The name of a machine; where it has none, it is one that was measured."""
    return next((name for name, known in MACHINES.items() if known == machine), "this host, as it was measured")


def described(machine: Machine) -> str:
    """The name of a machine, and its figures if it was measured."""
    name = name_of(machine)
    return name if name in MACHINES else f"{name} ({machine.inside}, flops={machine.flops:g})"


def keep(machine: Machine) -> Path | None:
    """Keep a machine as the one that was measured here; None where nothing is kept on disk, or it cannot be."""
    root = root_folder()
    if root is None:
        return None
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(root / _FILE, json.dumps(_fields(machine)).encode())
    except OSError:
        return None
    _read.cache_clear()
    return root / _FILE


_FILE = "links.json"


def _measured_here() -> Machine | None:
    """What was measured on this host; None where ranks are on several, which may have measured different figures."""
    root = root_folder()
    return _read(str(root / _FILE)) if root is not None and _is_one_host(os.environ) else None


def _is_one_host(env: Mapping[str, str]) -> bool:
    return all(env.get(size) == env.get(here) for size, here in _SIZES)


@functools.lru_cache(maxsize=4)  # A process has one default, whatever is measured beside it.
def _read(path: str) -> Machine | None:
    try:
        found = json.loads(Path(path).read_text())
        return Machine(Link(*found["inside"]), Link(*found["between"]), found["host"], found["flops"], found["memory"])
    except (OSError, ValueError, KeyError, TypeError, MeshfuseError):  # Not measured, or no longer readable.
        return None


def _fields(machine: Machine) -> dict[str, object]:
    links = {name: [link.bandwidth, link.latency]
             for name, link in (("inside", machine.inside), ("between", machine.between))}  # fmt: skip
    return {**links, "host": machine.host, "flops": machine.flops, "memory": machine.memory}
