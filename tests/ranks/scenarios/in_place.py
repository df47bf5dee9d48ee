"""Arguments that are written: every rank writes its own shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtensors import annotate, torch_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import meshfuse as mf
import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import DataType, FusionDefinition
from tools import X, Y, columns, cut, grid, line, place, rows, same, size, split


def shards_are_written() -> None:
    """The last rank's shard is short, and the result is not annotated."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([2 * size() + 1, 3])
        y = fd.ops.exp(x)
        fd.add_output(y, alias_input=x)
        fd.add_output(fd.ops.sum(y, [0]))
        place(line(), x)
        split(x, 0)
    whole = torch.randn(2 * size() + 1, 3)
    mine = cut(whole, x).clone()
    for step in range(1, 3):
        (total,) = fd.execute([mine])
        whole = whole.exp()
        same(mine, cut(whole, x))
        same(total, whole.sum(0), rtol=1e-5, atol=1e-5)
        assert step == 2 or whole.max() < 80


def weights_take_a_step() -> None:
    """The gradient is a sum over data-parallel rows, the weight lies on columns: the update is made where it lies."""
    with FusionDefinition() as fd:
        x, grad = fd.define_tensor([2 * rows(), 4]), fd.define_tensor([2 * rows(), 6])
        w = fd.define_tensor([4, 6])
        step = fd.ops.mul(fd.ops.matmul(fd.ops.permute(x, [1, 0]), grad), 0.5)
        fd.add_output(fd.ops.sub(w, step), w)
        place(grid(), x, grad, w)
        for tv in (x, grad):
            split(tv, 0, Y)
        split(w, 1, X)
    a, g, weight = torch.randn(2 * rows(), 4), torch.randn(2 * rows(), 6), torch.randn(4, 6)
    mine = cut(weight, w).clone(memory_format=torch.contiguous_format)
    assert mine.shape == (4, 6 // columns())
    assert fd.execute([cut(a, x), cut(g, grad), mine]) == []
    same(mine, cut(weight - 0.5 * a.t() @ g, w))


def a_whole_argument_beside_a_sharded_one() -> None:
    """An argument without annotation is the same on every rank, and so is what is written there."""
    with FusionDefinition() as fd:
        x, total = fd.define_tensor([-1, 3]), fd.define_tensor([3], dtype=DataType.Double)
        more = fd.ops.add(total, fd.ops.sum(fd.ops.cast(x, DataType.Double), [0]))
        fd.add_output(more, total)
        fd.add_output(more)
        place(line(), x)
        split(x, 0)
    whole, running = torch.randn(2 * size(), 3), torch.zeros(3, dtype=torch.float64)
    for step in range(1, 4):
        (found,) = fd.execute([cut(whole, x), running])
        assert found is running
        same(running, step * whole.double().sum(0))


def dtensors_are_written() -> None:
    mesh = torch_mesh("tp")
    whole = torch.randn(2 * size(), 3)
    for placement in (Shard(0), Replicate()):
        given = distribute_tensor(whole.clone(), mesh, [placement])
        with FusionDefinition() as fd:
            x = fd.define_tensor([-1, -1])
            fd.add_output(fd.ops.neg(x), x)
            annotate(x, given)
        assert nvfuser.execute_with_dtensors(fd, [given]) == []
        same(given.full_tensor(), -whole)


def a_result_that_lies_otherwise_is_refused() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([2 * size(), 2 * size()])
        y = fd.ops.neg(x)
        fd.add_output(y, x)
        place(line(), x, y)
        split(x, 0)
        split(y, 1)
    if size() > 1:
        with pytest.raises(mf.ArgumentError, match="written into argument"):
            fd.execute([cut(torch.ones(2 * size(), 2 * size()), x)])


def annotated_by_calls_on_tensors() -> None:
    """fd.sched's forms, in a class whose methods the executor calls."""

    class Model(FusionDefinition):
        def definition(self) -> None:
            self.x, self.w = self.define_tensor([-1, 3 * size()]), self.define_tensor([3 * size(), 5])
            self.out: Any = self.ops.matmul(self.x, self.w)
            self.add_output(self.out)

        def multidevice_schedule(self) -> None:
            for tv, axis in ((self.x, -1), (self.w, 0), (self.out, -1)):
                self.sched._set_device_mesh(tv, line())
                self.sched.split(tv, axis, size(), False)
            self.sched.parallelize(self.x, -2, X)
            self.sched.parallelize(self.w, 0, X)
            self.sched.set_allocation_as_loop(self.w)
            terms = self.sched.rfactor(self.out, dims=[-1])
            self.sched._set_device_mesh(terms, line())
            self.sched.parallelize(terms, -2, X)

    a, b = torch.randn(4, 3 * size()), torch.randn(3 * size(), 5)
    rank = nvfuser.multidevice.Communicator.instance().rank()
    fd = Model()
    (found,) = fd.execute([a.chunk(size(), 1)[rank], b.chunk(size(), 0)[rank]])
    same(found, a @ b, rtol=1e-5, atol=1e-5)
    assert fd.fec.get_output_shardings()[0].axis_sharded_on(nvfuser.ParallelType.stream) == -1
