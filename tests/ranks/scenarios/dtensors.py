"""DTensors in and out: `execute_with_dtensors`, with annotations made from the placements."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshfuse.nvfuser_direct as nvfuser
from meshfuse import World
from meshfuse.frontends.placing import join_default_group
from meshfuse.nvfuser_direct import DataType, FusionDefinition, ParallelType
from tools import columns, rows, same, size


def torch_mesh(*names: str) -> Any:
    """torch's mesh of all ranks, in its own default process group."""
    if not dist.is_initialized() and size() > 1:
        join_default_group(World.current(), torch.device("cpu"))
    elif not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = (size(),) if len(names) == 1 else (rows(), columns())
    return dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)


def annotate(tv: Any, tensor: DTensor) -> None:
    """The splits that placements on a mesh of one axis mean."""
    mesh = nvfuser.multidevice.DeviceMesh(tensor.device_mesh.mesh)
    tv.set_device_mesh(mesh)
    (placement,) = tensor.placements
    if placement.is_shard():
        tv.split(placement.dim, mesh.size, inner_split=False)
        tv.axis(placement.dim).parallelize(ParallelType.mesh_x)
        tv.set_allocation_domain(tv.get_loop_domain(), new_contiguity=True)


def plus_one_keeps_mesh_placements_and_names() -> None:
    mesh = torch_mesh("tp")
    whole = torch.randn(size(), 4)
    given = distribute_tensor(whole, mesh, [Shard(0)])
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=False)
        fd.add_output(fd.ops.add(x, fd.define_scalar(1.0, dtype=DataType.Float)))
        annotate(x, given)
    (found,) = nvfuser.execute_with_dtensors(fd, [given])
    same(found.to_local(), given.to_local() + 1)
    assert found.device_mesh == mesh and found.device_mesh.mesh_dim_names == ("tp",)
    assert found.placements == given.placements
    same(found.full_tensor(), whole + 1)


def two_mesh_axes() -> None:
    mesh = torch_mesh("dp", "tp")
    a, b = torch.randn(size(), 6), torch.randn(8, 6)
    x, w = (
        distribute_tensor(a, mesh, [Shard(0), Replicate()]),
        distribute_tensor(b, mesh, [Replicate(), Shard(0)]),
    )
    with FusionDefinition() as fd:
        fd.add_output(fd.ops.linear(fd.from_pytorch(x), fd.from_pytorch(w)))
    (found,) = nvfuser.execute_with_dtensors(fd, [x, w])
    assert found.placements == (Shard(0), Shard(1)) and found.device_mesh.mesh_dim_names == ("dp", "tp")
    same(found.full_tensor(), F.linear(a, b))


@functools.cache
def _definition(kind: str, dims: int) -> dict[Any, FusionDefinition]:
    return {}


def _defined(kind: str, tensors: list[DTensor]) -> FusionDefinition:
    """The definition of a linear's forward or backward, made once for each kind of placements."""
    cache, key = _definition(kind, tensors[0].dim()), tuple(t.placements for t in tensors)
    if key not in cache:
        with FusionDefinition() as fd:
            tvs = [fd.define_tensor([-1] * t.dim(), contiguity=True, dtype=DataType.BFloat16) for t in tensors]
            _forward(fd, *tvs) if kind == "forward" else _backward(fd, *tvs, tensors[1].shape)
            for tv, tensor in zip(tvs, tensors, strict=True):
                annotate(tv, tensor)
        cache[key] = fd
    return cache[key]


def _forward(fd: FusionDefinition, x: Any, w: Any) -> None:
    fd.add_output(fd.ops.linear(x, w))


def _backward(fd: FusionDefinition, x: Any, w: Any, grad: Any, shape: torch.Size) -> None:
    flat = fd.ops.reshape(grad, [-1, shape[0]])
    fd.add_output(fd.ops.matmul(grad, w))
    fd.add_output(fd.ops.matmul(fd.ops.permute(flat, [1, 0]), fd.ops.reshape(x, [-1, shape[1]])))


class Linear(torch.autograd.Function):
    """x @ w.T by two definitions."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, w: DTensor) -> DTensor:
        ctx.save_for_backward(x, w)
        return nvfuser.execute_with_dtensors(_defined("forward", [x, w]), [x, w])[0]

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> Any:
        tensors = [*ctx.saved_tensors, *grads]
        return tuple(nvfuser.execute_with_dtensors(_defined("backward", tensors), tensors))


def linear_with_gradients(row: bool = False) -> None:
    mesh, d, e = torch_mesh("tp"), size(), 5
    x_shape, w_shape = ((2, 3, d * e), (e, d * e)) if row else ((2, 3, e), (d * e, e))
    a, b = (torch.randint(-4, 4, shape).bfloat16().requires_grad_() for shape in (x_shape, w_shape))
    x = distribute_tensor(a.detach(), mesh, [Shard(2) if row else Replicate()]).requires_grad_()
    w = distribute_tensor(b.detach(), mesh, [Shard(1 if row else 0)]).requires_grad_()
    found, wanted = Linear.apply(x, w), F.linear(a, b)
    assert found.placements == ((Replicate(),) if row else (Shard(2),))
    mine = torch.autograd.grad(found, (x, w), torch.ones_like(found))
    theirs = torch.autograd.grad(wanted, (a, b), torch.ones_like(wanted))
    assert [t.placements for t in mine] == [x.placements, w.placements]
    for one, other in zip((found, *mine), (wanted, *theirs), strict=True):
        same(one.full_tensor(), other)


def row_parallel_linear_with_gradients() -> None:
    linear_with_gradients(row=True)
