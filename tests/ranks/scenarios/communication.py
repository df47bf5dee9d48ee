"""Each kind of communication, by annotations of what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshfuse.nvfuser_direct import DataType, FusionDefinition, ParallelType, PythonProfiler
from tools import X, Y, cut, expect, grid, line, place, same, size, split

Notes = Callable[[Any, Any], None]


def run_set(whole: torch.Tensor, mesh: Any, notes: Notes, *kinds: str) -> PythonProfiler:
    """`set` from one sharding to another; `kinds` are the collectives that it may take."""
    dtype = {torch.float32: DataType.Float, torch.float16: DataType.Half}[whole.dtype]
    with FusionDefinition() as fd:
        x = fd.define_tensor(list(whole.shape), contiguity=True, dtype=dtype)
        y = fd.ops.set(x)
        fd.add_output(y)
        place(mesh, x, y)
        notes(x, y)
    with PythonProfiler() as profiler:
        (found,) = fd.execute([cut(whole, x)])
    same(found, cut(whole, y), rtol=0, atol=0)
    if kinds:
        expect(profiler, *kinds)
    return profiler


def all_gather() -> None:
    run_set(torch.randn(4 * size()), line(), lambda x, y: split(x, 0), "all-gather")


def all_gather_over_x_while_y_stays() -> None:
    def notes(x: Any, y: Any) -> None:
        for tv in (x, y):
            split(tv, 0, Y)
        split(x, 2, X)

    run_set(torch.randn(size(), 6), grid(), notes, "all-gather")


def gather_of_two_axes_in_one_set() -> None:
    """nvFuser has no communication for it."""

    def notes(x: Any, y: Any) -> None:
        split(x, 0, Y)
        split(x, 2, X)

    run_set(torch.randn(size(), 6), grid(), notes)


def swap_of_two_axes_between_dims() -> None:
    def notes(x: Any, y: Any) -> None:
        for tv, first, second in (
            (x, Y, X),
            (y, X, Y),
        ):
            split(tv, 0, first)
            split(tv, 2, second)

    run_set(torch.randn(12, 8), grid(), notes)


def replicated_to_sharded_is_a_slice() -> None:
    profiler = run_set(torch.randn(2 * size(), 3), line(), lambda x, y: split(y, 0))
    expect(profiler)


def gather_of_uneven_shards() -> None:
    run_set(torch.randn(2 * size() + 1, 3), line(), lambda x, y: split(x, 0))


def all_gather_of_an_expanded_dim() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([size()], contiguity=True)
        wide = fd.ops.broadcast_in_dim(x, [size(), 3], [0])
        y = fd.ops.set(wide)
        fd.add_output(y)
        place(line(), x, wide, y)
        x.axis(0).parallelize(X)
        wide.axis(0).parallelize(X)
    whole = torch.randn(size())
    same(fd.execute([cut(whole, x)])[0], whole[:, None].expand(-1, 3))


def all_reduce_with_the_output_left_free() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1, -1], contiguity=True)
        fd.add_output(fd.ops.sum(x, [1]))
        place(line(), x)
        split(x, 1)
    whole = torch.randn(2, 3 * size(), 5)
    same(fd.execute([cut(whole, x)])[0], whole.sum(1))


def reduce_scatter(*middle: int) -> None:
    """From a dim that is the axis itself to a loop split of the last dim."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([size(), *middle, 4 * size()], contiguity=True)
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        place(line(), x, y)
        x.axis(0).parallelize(X)
        split(y, -1)
    whole = torch.randn(size(), *middle, 4 * size())
    with PythonProfiler() as profiler:
        (found,) = fd.execute([cut(whole, x)])
    same(found, cut(whole.sum(0), y))
    expect(profiler, "reduce-scatter")


def reduce_scatter_of_a_dim_that_is_not_outermost_in_memory() -> None:
    reduce_scatter(3)


def all_to_all(source: int = 0, target: int = 1) -> None:
    def notes(x: Any, y: Any) -> None:
        split(x, source)
        split(y, target)

    whole = torch.randn(size(), 3 * size(), dtype=torch.float16)
    run_set(whole, line(), notes, "all-to-all")


def all_to_all_back() -> None:
    all_to_all(1, 0)


def all_to_all_that_also_permutes() -> None:
    """nvFuser refuses it."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([2 * size(), 3 * size(), 2])
        y = fd.ops.permute(x, [2, 1, 0])
        fd.add_output(y)
        place(line(), x, y)
        split(x, 0)
        split(y, 1)
    whole = torch.randn(2 * size(), 3 * size(), 2)
    same(fd.execute([cut(whole, x)])[0], cut(whole.permute(2, 1, 0), y))


def reductions_over_each_axis(kind: ParallelType = X) -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        y = fd.ops.sum(x, [0])
        fd.add_output(y)
        place(grid(), x, y)
        split(x, 0, kind)
    whole = torch.randn(12, 5)
    same(fd.execute([cut(whole, x)])[0], whole.sum(0))


def reduction_over_mesh_y() -> None:
    """nvFuser reduces over the ranks of mesh_x in its place."""
    reductions_over_each_axis(Y)


def one_set_for_many_readers() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, 4])
        gathered = fd.ops.set(x)
        outputs = [fd.ops.relu(gathered), fd.ops.sum(gathered, [0]), fd.ops.neg(gathered)]
        for y in outputs:
            fd.add_output(y)
        place(line(), x, gathered)
        split(x, 0)
    whole = torch.randn(2 * size(), 4)
    with PythonProfiler() as profiler:
        found = fd.execute([cut(whole, x)])
    same(found, [whole.relu(), whole.sum(0), -whole])
    expect(profiler, "all-gather")
