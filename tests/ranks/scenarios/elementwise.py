"""Elementwise chains and reductions."""

from __future__ import annotations

import torch

import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import DataType, FusionDefinition, PythonProfiler
from tools import (
    X,
    Y,
    Z,
    columns,
    communications,
    coordinates,
    cut,
    expect,
    grid,
    line,
    place,
    rank,
    rows,
    same,
    size,
    split,
)


def replicated_in_mid_chain() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=False)
        half = fd.ops.relu(x)
        y = fd.ops.add(half, half)
        fd.add_output(y)
        place(line(), *(value for value in fd.fusion.vals() if value.is_tensor()))
        x.axis(0).parallelize(X)
    whole = torch.randn(size(), 4)
    same(fd.execute([cut(whole, x)])[0], whole.relu() * 2)
    assert fd.fec.get_output_shardings()[0].axis_sharded_on(X) == -1


def reshard_after_relu() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1], contiguity=True)
        y = fd.ops.relu(x)
        fd.add_output(y)
        place(line(), x, y)
        split(x, 0)
    whole = torch.randn(3 * size(), 5)
    same(fd.execute([cut(whole, x)])[0], whole.relu())


def halves_add_up_in_float_and_follow_the_sharded_operand() -> None:
    with FusionDefinition() as fd:
        x, y = (fd.define_tensor([-1, -1], contiguity=True, dtype=DataType.Half) for _ in range(2))
        fd.add_output(fd.ops.add(x, y))
        place(line(), x, y)
        split(y, 0)
    a, b = (torch.randn(2 * size(), 3, dtype=torch.float16) for _ in range(2))
    (found,) = fd.execute([a, cut(b, y)])
    assert found.dtype == torch.float32
    same(found, (a.float() + b.float()).chunk(size())[rank()])


def a_mesh_of_three_axes_with_a_permuted_allocation() -> None:
    shape = (rows(), columns(), 1)
    mesh = nvfuser.multidevice.DeviceMesh(torch.arange(size()).reshape(shape))
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1, -1])
        y = fd.ops.relu(x)
        fd.add_output(y)
        place(mesh, x, y)
        for tv in (x, y):
            for dim, kind in ((2, X), (1, Y), (0, Z)):
                split(tv, dim, kind)
        y.set_allocation_domain([y.axis(i) for i in (0, 2, 4, 6, 1, 3, 5)], True)
    whole = torch.randn(2 * shape[0], 6, 3, 5)
    (found,) = fd.execute([cut(whole, x)])
    same(found, cut(whole.relu(), y))
    assert found.permute(3, 0, 1, 2).is_contiguous()


def local_statistics_along_a_whole_dim() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([1, 2 * size(), 48], contiguity=True)
        for y in fd.ops.var_mean(x, dims=[2], correction=0, keepdim=False):
            fd.add_output(y)
        place(line(), x)
        split(x, 1)
    whole = torch.randn(1, 2 * size(), 48)
    with PythonProfiler() as profiler:
        found = fd.execute([cut(whole, x)])
    part = cut(whole, x)
    same(found, [part.var(2, correction=0), part.mean(2)])
    expect(profiler)


def statistics_over_a_sharded_dim() -> None:
    """nvFuser raises: var_mean and softmax need their dim whole there."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 500 * size() + 1])
        outputs = [*fd.ops.var_mean(x, dims=[1], correction=1), fd.ops.softmax(x, 1)]
        for y in outputs:
            fd.add_output(y)
        place(line(), x, *outputs)
        split(x, 1)
        split(outputs[2], 1)
    whole = torch.randn(3, 500 * size() + 1) + 5
    with PythonProfiler() as profiler:
        var, mean, probabilities = fd.execute([cut(whole, x)])
    same([var, mean], [whole.var(1), whole.mean(1)])
    same(probabilities, cut(whole.softmax(1), x))
    # No more than an all-reduce of each of four statistics of every row.
    assert bool(communications(profiler)) == (size() > 1)
    assert fd.bill().total <= 4 * 2 * (size() - 1) / size() * 4 * 3


def one_cast_for_a_sharded_and_a_whole_reduction() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1], dtype=DataType.BFloat16)
        wide = fd.ops.squeeze(fd.ops.broadcast(x, [True, False, False, False]), dims=[0])
        wide = fd.ops.cast(wide, dtype=DataType.Float)
        fd.add_output(fd.ops.sum(wide, dims=[0]))
        fd.add_output(fd.ops.sum(wide, dims=[1]))
        place(line(), x)
        split(x, 0)
    whole = torch.randn(3 * size(), 5, 6).bfloat16()
    across, along = fd.execute([cut(whole, x)])
    same(across, whole.float().sum(0))
    same(along, cut(whole, x).float().sum(1))


def sum_over_x_keeps_y() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.ops.sum(x, [1])
        fd.add_output(y)
        place(grid(), x, y)
        split(x, 0, Y)
        split(x, 2, X)
        split(y, 0, Y)
    whole = torch.randn(3 * rows(), 4)
    same(fd.execute([cut(whole, x)])[0], whole.sum(1).chunk(rows())[coordinates()[0]])


def scans_sorts_and_looks_up_along_a_sharded_dim() -> None:
    """nvFuser raises on each of them."""
    with FusionDefinition() as fd:
        x, index = fd.define_tensor([3, -1]), fd.define_tensor([4], dtype=DataType.Int)
        outputs = [fd.ops.cumsum(x, 1), fd.ops.argsort(x, 1), fd.ops.index_select(x, index, 1)]
        outputs += [fd.ops.topk(x, 2, 1, True, True)[0]]
        for y in outputs:
            fd.add_output(y)
        place(line(), x, *outputs)
        split(x, 1)
    whole, chosen = torch.randn(3, 3 * size()), torch.tensor([0, 3 * size() - 1, 2, 2])
    found = fd.execute([cut(whole, x), chosen])
    values = [whole.cumsum(1), whole.argsort(1), whole.index_select(1, chosen), whole.topk(2, 1)[0]]
    same(found, values)


def numbers_by_global_index() -> None:
    """nvFuser raises on sharded iota and triu, and draws the same uniform numbers on every rank."""
    d = size()
    with FusionDefinition() as fd:
        x = fd.define_tensor([2 * d, 6])
        places = fd.ops.add(fd.ops.iota(2 * d, 0, 1), 0)
        upper, drawn = fd.ops.triu(x, 1), fd.ops.uniform(0.0, 1.0, shape=[2 * d, 6])
        for y in (places, upper, drawn):
            fd.add_output(y)
        place(line(), x, places, upper, drawn)
        for tv in (x, places, upper, drawn):
            split(tv, 0)
    whole = torch.randn(2 * d, 6)
    found = fd.execute([cut(whole, x)])
    same(found[:2], [torch.arange(2 * d).chunk(d)[rank()], whole.triu(1).chunk(d)[rank()]])
    fd.validate([cut(whole, x)])


def merge_of_a_sharded_inner_dim() -> None:
    """nvFuser raises: only the outer operand of a merge may be sharded there."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([3, 2 * size()])
        y = fd.ops.reshape(x, [6 * size()])
        fd.add_output(y)
        place(line(), x, y)
        split(x, 1)
    whole = torch.randn(3, 2 * size())
    same(fd.execute([cut(whole, x)])[0], whole.flatten())


def annotations_before_the_ops() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 3])
        place(line(), x)
        split(x, 0)
        fd.add_output(fd.ops.neg(x))
    whole = torch.randn(2 * size(), 3)
    same(fd.execute([cut(whole, x)])[0], -cut(whole, x))


def a_rank_outside_the_mesh() -> None:
    last = size() - 1
    mesh = nvfuser.multidevice.DeviceMesh([last])
    with FusionDefinition() as fd:
        x = fd.define_tensor([4])
        y = fd.ops.neg(x)
        fd.add_output(y)
        place(mesh, x, y)
    whole = torch.randn(4)
    (found,) = fd.execute([cut(whole, x)])
    assert found is None if rank() != last else torch.equal(found, -whole)
