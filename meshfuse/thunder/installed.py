"""Importing Lightning Thunder: the error that says what to install, and what newer versions of torch lack."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

import torch

from ..errors import MeshfuseError, line_in_script, user_error


class ThunderMissing(MeshfuseError, ImportError):
    """Lightning Thunder cannot be imported."""


def check_installed() -> None:
    """Raises ThunderMissing where there is no Thunder."""
    found = importlib.util.find_spec("thunder")
    if found is None or found.origin is None:  # A folder of that name is no package.
        raise user_error(
            "mf.thunder", "no package thunder", "Lightning Thunder 0.2.6",
            "Run `pip install lightning-thunder==0.2.6`, or install meshfuse with the extra `thunder`.",
            line_in_script(sys._getframe(1), ("importlib",)), ThunderMissing,
        )  # fmt: skip


# Methods of named tensors, which torch 2.13 no longer has. Thunder 0.2.6 names them as it is imported, in a table of
# torch's ops; it calls them where a program does, which cannot be.
GONE = ("align_as", "align_to", "has_names", "refine_names", "rename")


def _gone(name: str) -> Callable[..., None]:
    def method(*_: object, **__: object) -> None:
        raise NotImplementedError(f"torch.Tensor.{name}: named tensors are no part of this version of torch")

    method.__name__ = name  # Thunder compares it with the attribute's.
    return method


@contextlib.contextmanager
def with_missing_names() -> Iterator[None]:
    """In this context torch.Tensor has the methods that Thunder names and torch no longer has."""
    missing = [name for name in GONE if not hasattr(torch.Tensor, name)]
    for name in missing:
        setattr(torch.Tensor, name, _gone(name))
    try:
        yield
    finally:
        for name in missing:
            delattr(torch.Tensor, name)


def import_thunder() -> None:
    """Import Thunder, on versions of torch that it does not know as well. Raises ThunderMissing where there is none."""
    check_installed()
    with with_missing_names():
        importlib.import_module("thunder")
