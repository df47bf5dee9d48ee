"""What the scenarios share: this rank, meshes, and the two calls that most annotations are made of."""

from __future__ import annotations

from typing import Any

import torch

import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import ParallelType

X, Y, Z = ParallelType.mesh_x, ParallelType.mesh_y, ParallelType.mesh_z
STREAM = ParallelType.stream
same = torch.testing.assert_close
cut = nvfuser.multidevice.shard_tensor


def size() -> int:
    return nvfuser.multidevice.Communicator.instance().size()


def rank() -> int:
    return nvfuser.multidevice.Communicator.instance().rank()


def line() -> nvfuser.multidevice.DeviceMesh:
    """All ranks along mesh_x."""
    return nvfuser.multidevice.DeviceMesh(torch.arange(size()))


def rows() -> int:
    return size() // columns()


def columns() -> int:
    return min(2, size())


def grid() -> nvfuser.multidevice.DeviceMesh:
    """Rows of ranks along mesh_y, two columns (one, where there is one rank) along mesh_x."""
    return nvfuser.multidevice.DeviceMesh(torch.arange(size()).reshape(rows(), columns()))


def coordinates() -> tuple[int, int]:
    """This rank's row and column in the grid."""
    return divmod(rank(), columns())


def place(mesh: nvfuser.multidevice.DeviceMesh, *tensors: Any) -> None:
    for tv in tensors:
        tv.set_device_mesh(mesh)


def split(tv: Any, axis: int, kind: ParallelType = X) -> None:
    """Cut a loop axis in as many parts as the mesh has ranks along `kind`, and bind the outer one."""
    axis = axis % len(tv.get_loop_domain())
    tv.outer_split(axis, tv.mesh.axis_size(tv.mesh.parallel_axis(kind)))
    tv.axis(axis).parallelize(kind)


def whole_numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Small integers: sums of them are exact in every dtype and order."""
    return torch.randint(-2, 3, shape).to(dtype)


def communications(profiler: nvfuser.PythonProfiler) -> list[str]:
    """The names of the collectives of the last profiled execution."""
    return [kernel.name for kernel in profiler.profile.kernel_profiles if kernel.scheduler == "communication"]


def expect(profiler: nvfuser.PythonProfiler, *kinds: str) -> None:
    """The collectives of the last profiled execution must be these; none where there is one rank."""
    found = communications(profiler)
    assert found == (list(kinds) if size() > 1 else []), found
