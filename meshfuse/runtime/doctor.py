"""`meshfuse doctor`: what this machine and its Python offer, and what follows for meshfuse."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import MeshfuseError
from .environment import read_environment, time_limit

_OLDEST_PYTHON = (3, 10)


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked for, what is there, and what that means."""

    name: str
    state: str
    meaning: str


def report() -> str:
    """A table of Python, torch, CUDA, gloo, NCCL, nvFuser, Thunder and the launcher."""
    return findings_table(findings())


def findings() -> list[Finding]:
    """The rows of `report`. Never imports nvFuser: a broken one would end the process."""
    torch = _torch()
    rows = [_python(), _cpu(), _torch_row(torch)]
    if torch is not None:
        rows += [_cuda(torch), _gloo(torch), _nccl(torch), _nvfuser(torch)]
    return [*rows, _thunder(), _launched(), _limit()]


def findings_table(rows: list[Finding]) -> str:
    """Three aligned columns under a heading."""
    cells = [("what", "found", "what that means"), *((row.name, row.state, row.meaning) for row in rows)]
    first, second = (max(len(line[column]) for line in cells) for column in (0, 1))
    return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}" for a, b, c in cells)


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):
        return None


def _python() -> Finding:
    enough = sys.version_info >= _OLDEST_PYTHON
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    meaning = "fine" if enough else f"too old: meshfuse needs {oldest}"
    return Finding("Python", platform.python_version(), meaning)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("CPU cores", str(cores), f"more real ranks than {cores} work, but share cores")


def _torch_row(torch: Any) -> Finding:
    if torch is not None:
        return Finding("torch", torch.__version__, "programs run in eager torch")
    broken = importlib.util.find_spec("torch") is not None
    if broken:
        return Finding("torch", "broken", "its import fails: reinstall it")
    return Finding("torch", "none", "programs can be planned but not run: install it")


def _cuda(torch: Any) -> Finding:
    if torch.version.cuda is None:
        return Finding("CUDA", "no (torch built for CPU)", "tensors and ranks live on the CPU")
    if not torch.cuda.is_available():
        return Finding("CUDA", f"{torch.version.cuda}, no device", "tensors and ranks live on the CPU")
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    state = f"{torch.version.cuda}, {count} × {names}"
    return Finding("CUDA", state, f"up to {count} CUDA ranks on this machine")


def _gloo(torch: Any) -> Finding:
    there = _backend(lambda: torch.distributed.is_gloo_available())
    if there:
        return Finding("gloo", "yes", "real ranks on CPUs: `meshfuse run` and torchrun")
    return Finding("gloo", "none", "no CPU ranks: simulated ranks only")


def _nccl(torch: Any) -> Finding:
    there = _backend(lambda: torch.distributed.is_nccl_available())
    if not there:
        return Finding("NCCL", "none", "no real ranks on CUDA devices")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.cuda.is_available():
        return Finding("NCCL", version, "real ranks on CUDA devices")
    return Finding("NCCL", version, "unused, as there is no device")


def _backend(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except AttributeError:
        return False


def _nvfuser(torch: Any) -> Finding:
    if importlib.util.find_spec("nvfuser_direct") is None:
        return Finding("nvFuser", "none", "not needed: segments run in torch")
    usable = torch.cuda.is_available()
    meaning = "can compile CUDA segments" if usable else "installed, but unused without a CUDA device"
    return Finding("nvFuser", _version("nvfuser"), meaning)


def _version(package: str) -> str:
    """The version of the first distribution whose name starts with `package`; CUDA builds carry suffixes."""
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith(package):
            return f"{distribution.version} ({name})"
    return "of unknown version"


def _thunder() -> Finding:
    if importlib.util.find_spec("thunder") is None:
        return Finding("Thunder", "none", "not needed: definitions are written with meshfuse")
    return Finding("Thunder", _version("lightning-thunder"), "not used yet: definitions are written with meshfuse")


def _launched() -> Finding:
    try:
        place = read_environment()
    except MeshfuseError as error:
        return Finding("launcher", "wrong variables", str(error))
    if place.size == 1:
        return Finding("launcher", "none", "one rank; meshes run on simulated ranks in this process")
    where = f"rank {place.rank} of {place.size}, store at {place.address}:{place.port}"
    return Finding("launcher", place.source, where)


def _limit() -> Finding:
    try:
        return Finding("MESHFUSE_TIMEOUT", f"{time_limit():g} s", "the limit of every wait for a peer")
    except MeshfuseError as error:
        return Finding("MESHFUSE_TIMEOUT", "wrong", str(error))
