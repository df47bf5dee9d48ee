"""Importing nvfuser_direct, with an error that says which wheel fits where it cannot be had."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType

from ...errors import MeshfuseError

# The version that the lowerings are checked against. Wheels are named after the versions of CUDA and torch.
CHECKED = "0.2.36"
TORCH = "2.10"
# With CUDA 13 the wheel also runs on this torch, for which there is none, once a function that it lacks is preloaded.
NEXT_TORCH = "2.11"
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
PYTHONS = ((3, 10), (3, 12))
_CUDA_WHEELS = {"12": "nvfuser-cu128-torch210", "13": "nvfuser-cu130-torch210"}


class NvfuserMissing(MeshfuseError, ImportError):
    """nvFuser is not installed, or not in a version that fits this Python and this torch."""


@functools.cache
def load_nvfuser() -> ModuleType:
    """The module `nvfuser_direct`. Raises NvfuserMissing with the name of the wheel that fits."""
    torch_version = _torch_version()
    _check_environment(torch_version)
    _keep_to_one_device()
    try:
        module = importlib.import_module("nvfuser_direct")
    except (ImportError, OSError) as error:
        advice = _preload() if _is(torch_version, NEXT_TORCH) else _advice()
        raise _missing("cannot be imported", _first_line(error), advice) from error
    found = str(getattr(module, "__version__", "unknown"))
    if found.partition("+")[0] != CHECKED:
        raise _missing("is of another version", found, f"{CHECKED}. {_advice()}")
    return module


def _check_environment(torch_version: str) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        machine = f"{sys.platform} {platform.machine()}"
        raise _missing("has no wheel for this machine", machine, "Linux x86_64")
    if sys.version_info[:2] not in PYTHONS:
        pythons = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        needed = f"Python {pythons}. {_advice()}"
        raise _missing("has no wheel for this Python", platform.python_version(), needed)
    if _is(torch_version, TORCH) or (_is(torch_version, NEXT_TORCH) and _torch_cuda().startswith("13.")):
        return
    found = f"torch {torch_version}" if torch_version else "no torch"
    raise _missing("fits another torch", found, f"torch {TORCH}. {_advice()}")


def _is(torch_version: str, minor: str) -> bool:
    return torch_version.split(".")[:2] == minor.split(".")


def _keep_to_one_device() -> None:
    """Tell nvFuser, by NVFUSER_DISABLE, to leave the launcher's variables alone.

    Its own communicator would take them for an order to meet the other ranks on a GPU each, when it first computes or
    when the process ends. Communication between ranks is meshfuse's.
    """
    options = os.environ.get("NVFUSER_DISABLE", "")
    launched = any(name in os.environ for name in _RANK_VARIABLES)
    if launched and "nvfuser_direct" not in sys.modules and "multidevice" not in options.split(","):
        os.environ["NVFUSER_DISABLE"] = ",".join(filter(None, (options, "multidevice")))


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _advice() -> str:
    """Which wheel to install for torch's CUDA; both wheels where torch does not tell."""
    wheels = " or ".join(_wheels(_torch_cuda))
    return f"Install torch {TORCH} with {wheels} (pip install 'meshfuse[nvfuser]')."


def _preload() -> str:
    """What to have where the wheel does not load: the torch that fits it, or a library that defines what it lacks."""
    return (
        f"torch {TORCH} with {_CUDA_WHEELS['13']}, or that wheel with LD_PRELOAD of a library that defines "
        f"c10::MessageLogger's constructor of torch {TORCH} (benchmarks/gpu/README.md)"
    )


def _wheels(cuda: Callable[[], str]) -> list[str]:
    major = cuda().partition(".")[0]
    return [_CUDA_WHEELS[major]] if major in _CUDA_WHEELS else list(_CUDA_WHEELS.values())


def _torch_cuda() -> str:
    try:
        return str(importlib.import_module("torch").version.cuda or "")
    except ImportError:
        return ""


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _missing(what: str, found: str, needed: str) -> NvfuserMissing:
    return NvfuserMissing(f"the nvFuser backend's nvfuser_direct {what}: found {found}, needed {needed}")
