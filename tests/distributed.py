"""Definitions of one sharded operand, and what tests of ops over a sharded dim ask of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import meshfuse as mf

Build = Callable[[mf.FusionDefinition, Any], Any]


def _type(t: torch.Tensor) -> mf.DataType:
    return mf.DataType(str(t.dtype).removeprefix("torch."))


def mesh_of(shape: tuple[int, ...]) -> mf.DeviceMesh:
    return mf.DeviceMesh(shape, ("x", "y")[: len(shape)])


def defined(build: Build, x: torch.Tensor, mesh: tuple[int, ...], dims: Sequence[Any]) -> mf.FusionDefinition:
    fd = mf.FusionDefinition()
    t = fd.define_tensor(list(x.shape), dtype=_type(x))
    made = build(fd, t)
    for tensor in made if isinstance(made, tuple) else (made,):
        fd.add_output(tensor)
    fd.mesh_split(t, mesh_of(mesh), list(dims))
    return fd


def op_names(fd: mf.FusionDefinition, *shapes: Sequence[int]) -> list[str]:
    return [node.name for node in fd.compile(*shapes).graph.nodes]


def assert_close(found: Sequence[torch.Tensor], wanted: Any, tolerance: float = 2e-5) -> None:
    for a, b in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b.to(a.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)
