"""Tensors cut as their annotations say, and the questions that scripts ask of meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import meshfuse.nvfuser_direct as nvfuser
from meshfuse.nvfuser_direct import FusionDefinition
from tools import X, Y, columns, coordinates, cut, grid, line, rank, rows, same, size, split

NVMesh = nvfuser.multidevice.DeviceMesh


def annotated(shape: list[int], mesh: NVMesh, notes: Callable[[Any], None], **options: Any) -> Any:
    """An input of a definition that returns it, annotated."""
    with FusionDefinition() as fd:
        tv = fd.define_tensor(shape, **options)
        fd.add_output(tv)
        tv.set_device_mesh(mesh)
        notes(tv)
    return tv


def inner_split() -> None:
    def notes(tv: Any) -> None:
        tv.inner_split(0, size())
        tv.axis(1).parallelize(X)

    whole = torch.arange(3.0 * size())
    same(cut(whole, annotated([-1], line(), notes)), whole[rank() :: size()])


def a_split_behind_another() -> None:
    def notes(tv: Any) -> None:
        tv.outer_split(0, 2)
        split(tv, 1)

    whole = torch.arange(6.0 * size())
    same(cut(whole, annotated([-1], line(), notes)), whole.view(2, size(), 3)[:, rank()].flatten())


def two_axes_on_two_dims() -> None:
    def notes(tv: Any) -> None:
        split(tv, 0, Y)
        split(tv, 2, X)

    whole, (row, column) = torch.arange(size() * 12.0).view(size(), 12), coordinates()
    wanted = whole.chunk(rows())[row].chunk(columns(), 1)[column]
    same(cut(whole, annotated([-1, -1], grid(), notes)), wanted)


def two_axes_nested_with_a_factor_between() -> None:
    def notes(tv: Any) -> None:
        tv.inner_split(0, columns() * 3)
        split(tv, 0, Y)
        split(tv, 2, X)

    whole, (row, column) = torch.arange(rows() * columns() * 12.0), coordinates()
    same(
        cut(whole, annotated([-1], grid(), notes)),
        whole.view(rows(), 4, columns(), 3)[row, :, column].flatten(),
    )


def x_outside_y_on_one_dim_in_any_loop_order() -> None:
    def notes(tv: Any) -> None:
        split(tv, 1, X)
        split(tv, 2, Y)
        tv.reorder({2: 0, 1: 1})

    whole, (row, column) = torch.arange(30.0 * size()).view(2, 3 * size(), 5), coordinates()
    wanted = whole.view(2, columns(), rows(), 3, 5)[:, column, row]
    same(cut(whole, annotated([-1, -1, 5], grid(), notes)), wanted)


def expanded_and_size_one_dims() -> None:
    expanded = torch.arange(2.0)[:, None].expand(2, 3 * size())
    tv = annotated([-1, -1], line(), lambda tv: split(tv, 1), contiguity=[True, None])
    same(cut(expanded, tv), torch.arange(2.0)[:, None].expand(2, 3))
    row = torch.arange(3.0 * size())[None]
    tv = annotated([1, -1], line(), lambda tv: split(tv, 1), contiguity=[None, True])
    same(cut(row, tv), row.chunk(size(), 1)[rank()])


def reduction_dims_are_not_cut() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([-1, -1])
        total = fd.ops.sum(x, [1])
        fd.add_output(total)
        for tv in (x, total):
            tv.set_device_mesh(line())
            split(tv, 1)
    whole = torch.arange(6.0 * size()).view(2, -1)
    same(cut(whole, x), whole.chunk(size(), 1)[rank()])
    same(cut(whole.sum(1), total), whole.sum(1))
    same(fd.execute([cut(whole, x)])[0], whole.sum(1))


def mesh_cuts_a_dim() -> None:
    whole = torch.arange(2.0 * size() * 3).view(2, -1)
    same(line().shard_tensor(whole, -1), whole.chunk(size(), 1)[rank()])
    same(line().shard_tensor(whole, 1, size() - 1), whole.chunk(size(), 1)[-1])


def an_inner_split_input_and_an_uneven_one() -> None:
    """nvFuser refuses both: inner-split shards of an input, and shards that are not equal."""
    with FusionDefinition() as fd:
        x, y = fd.define_tensor([2 * size()]), fd.define_tensor([2 * size() + 1, 3])
        doubled, total = fd.ops.add(x, x), fd.ops.sum(y, [0])
        fd.add_output(doubled)
        fd.add_output(total)
        for tv in (x, y, doubled):
            tv.set_device_mesh(line())
        x.inner_split(0, size())
        x.axis(1).parallelize(X)
        split(y, 0)
    a, b = torch.randn(2 * size()), torch.randn(2 * size() + 1, 3)
    found = fd.execute([cut(a, x), cut(b, y)])
    same(found, [a * 2, b.sum(0)])
