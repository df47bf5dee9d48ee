"""Importing nvfuser_direct, with an error that says which wheel fits where it cannot be had."""

from __future__ import annotations

import functools
import importlib
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType

from ...errors import MeshfuseError

# The version that the lowerings are checked against. Wheels are named after the versions of CUDA and torch.
CHECKED = "0.2.36"
TORCH = "2.10"
PYTHONS = ((3, 10), (3, 12))
_CUDA_WHEELS = {"12": "nvfuser-cu128-torch210", "13": "nvfuser-cu130-torch210"}


class NvfuserMissing(MeshfuseError, ImportError):
    """nvFuser is not installed, or not in a version that fits this Python and this torch."""


@functools.cache
def load() -> ModuleType:
    """The module `nvfuser_direct`. Raises NvfuserMissing with the name of the wheel that fits."""
    torch_version = _torch_version()
    _check_environment(torch_version)
    try:
        module = importlib.import_module("nvfuser_direct")
    except (ImportError, OSError) as error:
        raise _missing("cannot be imported", _first_line(error), _advice()) from error
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
    if torch_version.split(".")[:2] != TORCH.split("."):
        found = f"torch {torch_version}" if torch_version else "no torch"
        raise _missing("fits another torch", found, f"torch {TORCH}. {_advice()}")


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _advice() -> str:
    """The wheel for torch's CUDA; both where torch does not tell."""
    wheels = " or ".join(_wheels(_torch_cuda))
    return f"Install torch {TORCH} with {wheels} (pip install 'meshfuse[nvfuser]')."


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
