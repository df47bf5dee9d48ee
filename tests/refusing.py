"""The errors that a user may get, whatever is passed, and what tests pass it to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meshfuse as mf
from meshfuse.errors import MeshfuseError

MESH = mf.DeviceMesh((2, 4), ("dp", "tp"))
X = torch.zeros(8, 16)


def define() -> tuple[mf.FusionDefinition, mf.TensorView]:
    """A definition and an input, for which `X` fits."""
    fd = mf.FusionDefinition()
    x = fd.define_tensor([8, 16])
    return fd, x


def raises(text: str, action: Callable[[], Any], kind: type[Exception] = mf.DefinitionError) -> None:
    """The action raises an error with this text, and with a line of the file that the action is written in."""
    with pytest.raises(kind) as caught:
        action()
    found = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert text in found
    here = Path(action.__code__.co_filename).name
    assert re.search(rf"\(at {re.escape(here)}:\d+\)", found), found


@contextlib.contextmanager
def refused_in(file: str) -> Iterator[None]:
    """Lets the errors pass that a user may get: a ValueError of ours with a line of this file."""
    try:
        yield
    except MeshfuseError as error:
        assert isinstance(error, ValueError), repr(error)
        assert re.search(rf"\(at {re.escape(Path(file).name)}:\d+\)", str(error)), str(error)
