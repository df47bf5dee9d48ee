"""The three forms of NVIDIA/Fuser issue 3094: schedules in a method, communication by hand, DTensors in definitions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dtensors import torch_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshfuse.nvfuser_direct import CommunicationType, FusionDefinition, ParallelType
from tools import cut, line, rank, same, size


class ByMethods(FusionDefinition):
    """An MLP whose schedule puts the weights on the ranks of a mesh."""

    def definition(self) -> None:
        n = size()
        self.inp, self.up, self.down = (self.define_tensor(s) for s in ([6, 4], [4 * n, 4], [4, 4 * n]))
        self.hidden = self.ops.relu(self.ops.linear(self.inp, self.up))
        self.out = self.ops.linear(self.hidden, self.down)
        self.add_output(self.out)

    def multidevice_schedule(self) -> None:
        mesh = self.sched._create_device_mesh(tuple(range(size())))
        for tensor in (self.inp, self.up, self.down, self.out):
            self.sched._set_device_mesh(tensor, mesh)
        for tensor, axis in ((self.up, 0), (self.down, 1)):
            self.sched.split(tensor, axis, size(), False)
            self.sched.parallelize(tensor, axis, ParallelType.mesh_x)


class ByOlderName(ByMethods):
    """The schedule under the name that the issue has."""

    multidevice_schedule = None  # type: ignore[assignment]

    def multigpu_schedule(self) -> None:
        ByMethods.multidevice_schedule(self)


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4), torch.randn(4 * size(), 4), torch.randn(4, 4 * size())


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, up).relu(), down)


def schedules_in_a_method() -> None:
    for made in (ByMethods, ByOlderName):
        fd, whole = made(), weights()
        fd._complete()
        parts = [cut(x, tv) for x, tv in zip(whole, (fd.inp, fd.up, fd.down), strict=True)]
        assert parts[1].shape == (4, 4)
        same(fd.execute(parts)[0], mlp(*whole))


class Scattered(FusionDefinition):
    """Rank 0 has everything; the others compute with parts of it that copies bring them."""

    def definition(self) -> None:
        self.x = self.define_tensor([2 * size(), 3])
        self.y = self.ops.add(self.ops.exp(self.x), self.x)
        self.add_output(self.y)

    def multidevice_schedule(self) -> None:
        parts = [
            self.sched.cache_after(self.x, CommunicationType.Scatter),
            self.sched.cache_before(self.y, CommunicationType.Gather),
        ]
        root = self.sched._create_device_mesh((0,))
        for tensor in (self.x, self.y):
            self.sched._set_device_mesh(tensor, root)
        for tensor in parts:
            self.sched._set_device_mesh(tensor, line())
            self.sched.split(tensor, 0, size(), False)
            self.sched.parallelize(tensor, 0, ParallelType.mesh_x)


def caches_that_scatter_and_gather() -> None:
    whole = torch.randn(2 * size(), 3)
    (found,) = Scattered().execute([whole])
    if rank() == 0:
        same(found, whole.exp() + whole)
    else:
        assert found is None


def communication_as_ops() -> None:
    """A row-parallel product by reduce-scatter and all-gather, another by all-reduce; both go to the last rank."""
    whole = (torch.randn(2 * size(), 4 * size()), torch.randn(4 * size(), 3))
    with FusionDefinition() as fd:
        x, w = fd.define_tensor(list(whole[0].shape)), fd.define_tensor(list(whole[1].shape))
        part = fd.ops.neg(fd.ops.reduce_scatter(fd.ops.matmul(x, w), line(), 0))
        full = fd.ops.all_gather(part, line(), 0)
        total = fd.ops.all_reduce(fd.ops.matmul(x, w), line())
        first = fd.ops.gather(part, line(), 0)
        last = fd.ops.send(first, 0, size() - 1)
        for tensor in (full, total, last):
            fd.add_output(tensor)
        fd.mesh_split(x, line(), [None, "x"])
        fd.mesh_split(w, line(), ["x", None])
    found, product = fd.execute([cut(whole[0], x), cut(whole[1], w)]), whole[0] @ whole[1]
    same(found[0], -product)
    same(found[1], product)
    assert (found[2] is None) == (rank() != size() - 1)
    if found[2] is not None:
        same(found[2], -product)


def dtensors_in_a_definition() -> None:
    """Two tensors are given placements; the result has the layout that follows."""
    mesh, whole = torch_mesh("tp"), weights()
    with FusionDefinition() as fd:
        x, up, down = (fd.define_tensor(list(tensor.shape)) for tensor in whole)
        x, up = fd.ops.create_dtensor(x, mesh, [Replicate()]), fd.ops.create_dtensor(up, mesh, [Shard(0)])
        hidden = fd.ops.relu(fd.ops.linear(x, up))
        again = fd.ops.create_dtensor(down, mesh, [Shard(1)])
        fd.add_output(hidden.to_local())
        fd.add_output(fd.ops.create_dtensor(fd.ops.linear(hidden, again), mesh, [Replicate()]).to_local())
    placements: Any = ([Replicate()], [Shard(0)], [Shard(1)])
    given = [distribute_tensor(t, mesh, p) for t, p in zip(whole, placements, strict=True)]
    wrapped = fd.execute(given)
    if size() > 1:  # One rank has all of a tensor whichever way it is split.
        assert wrapped[0].placements == (Shard(1),) and wrapped[1].placements == (Replicate(),)
    same(wrapped[0].full_tensor(), F.linear(whole[0], whole[1]).relu())
    same(wrapped[1].full_tensor(), mlp(*whole))
    local = fd.execute([t.to_local() for t in given])
    assert local[0].shape == (6, 4)
    same(local[1], mlp(*whole))
