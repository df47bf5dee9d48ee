"""Where outputs lie that no annotation places: where a script written for nvFuser looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import meshfuse.nvfuser_direct as nvfuser
from meshfuse.errors import DefinitionError
from meshfuse.nvfuser_direct import DataType, FusionDefinition

X, Y = nvfuser.ParallelType.mesh_x, nvfuser.ParallelType.mesh_y
SHAPE = [2, 8, 16]


def split(tv: Any, axis: int, kind: Any = X, mesh: Any = None) -> Any:
    mesh = mesh or nvfuser.multidevice.DeviceMesh(range(2))
    tv.set_device_mesh(mesh)
    tv.outer_split(axis, mesh.shape[-1 if kind == X else 0])
    tv.axis(axis).parallelize(kind)
    return tv


def layouts(define: Callable[[FusionDefinition], None]) -> list[str]:
    """Each output's dims with the axes that cut them."""
    with FusionDefinition() as fd:
        define(fd)
    inputs: Any = fd.fusion.inputs()
    compiled = fd.compile(*[fd.recording.tensors[tv.id].type.shape for tv in inputs])
    return [str(sharding) for sharding in compiled.output_shardings()]


def whole(fd: FusionDefinition, shape: list[int] = SHAPE) -> Any:
    tv = fd.define_tensor(shape)
    tv.set_device_mesh(nvfuser.multidevice.DeviceMesh(range(2)))
    return tv


def drawn(fd: FusionDefinition) -> Any:
    return fd.ops.uniform(0.0, 1.0, shape=SHAPE, dtype=DataType.Float)


def counted(fd: FusionDefinition) -> Any:
    row = fd.ops.cast(fd.ops.iota(SHAPE[2], 0, 1), DataType.Float)
    return fd.ops.broadcast_in_dim(row, SHAPE, [2])


def full(fd: FusionDefinition) -> Any:
    return fd.ops.full(SHAPE, 0.25, DataType.Float)


def product(fd: FusionDefinition) -> Any:
    """Unreduced over the axis that the residual is split by."""
    x, w = split(fd.define_tensor([2, 8, 4]), 2), split(fd.define_tensor([16, 4]), 1)
    return fd.ops.linear(x, w)


def replicated(fd: FusionDefinition) -> Any:
    return fd.ops.relu(whole(fd))


@pytest.mark.parametrize("make", [drawn, counted, full, product, replicated])
def test_what_is_added_to_a_split_tensor_lies_as_it_does(make: Callable[[FusionDefinition], Any]) -> None:
    """Before and after the ops on the way, however many."""

    def define(fd: FusionDefinition) -> None:
        added = make(fd)
        mask = fd.ops.lt(added, 0.5)
        both = fd.ops.mul(added, fd.ops.cast(mask, DataType.Float))
        for tv in (added, mask, both, fd.ops.add(split(fd.define_tensor(SHAPE), 1), both)):
            fd.add_output(tv)

    assert layouts(define) == ["[-, x, -]"] * 4


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_sums_are_whole_whatever_was_reshaped_before(batch: int) -> None:
    """A split dim inside of merged ones is in no chunks; the sum over all of them does not lie over ranks."""

    def define(fd: FusionDefinition) -> None:
        x = split(fd.define_tensor([batch, 8, 16]), 1)
        rows = fd.ops.neg(fd.ops.reshape(x, [batch * 8, 16]))
        fd.add_output(fd.ops.cast(fd.ops.sum(rows, dims=[0]), DataType.BFloat16))
        fd.add_output(fd.ops.cast(fd.ops.sum(fd.ops.reshape(rows, [batch, 8, 16]), dims=[0, 1]), DataType.BFloat16))
        fd.add_output(fd.ops.sum(fd.ops.mul(fd.ops.reshape(rows, [batch, 8, 16]), x), dims=[2]))

    assert layouts(define) == ["[-]", "[-]", "[-, x]"]


def test_an_annotation_stays() -> None:
    def define(fd: FusionDefinition) -> None:
        placed = fd.ops.relu(whole(fd))
        placed.set_device_mesh(nvfuser.multidevice.DeviceMesh(range(2)))
        fd.add_output(placed)
        fd.add_output(fd.ops.add(fd.ops.neg(placed), split(fd.define_tensor(SHAPE), 1)))

    assert layouts(define) == ["[-, -, -]", "[-, x, -]"]


def test_the_first_operand_leads_where_all_are_as_sharded() -> None:
    def define(fd: FusionDefinition) -> None:
        first, second = split(fd.define_tensor([4, 8]), 0), split(fd.define_tensor([4, 8]), 1)
        fd.add_output(fd.ops.add(first, second))
        fd.add_output(fd.ops.add(second, first))

    assert layouts(define) == ["[x, -]", "[-, x]"]


def test_products_follow_the_weight_first() -> None:
    def define(fd: FusionDefinition) -> None:
        rows, weight = split(fd.define_tensor([4, 8]), 0), split(fd.define_tensor([6, 8]), 0)
        fd.add_output(fd.ops.linear(rows, weight))
        fd.add_output(fd.ops.matmul(rows, fd.ops.permute(weight, [1, 0])))
        fd.add_output(fd.ops.matmul(fd.ops.permute(weight, [0, 1]), fd.ops.permute(rows, [1, 0])))

    assert layouts(define) == ["[-, x]"] * 3


def test_a_dim_that_an_operand_cuts_is_not_cut_by_another() -> None:
    def define(fd: FusionDefinition) -> None:
        mesh = nvfuser.multidevice.DeviceMesh([[0, 1], [2, 3]])
        by_x, by_y = split(fd.define_tensor([8, 4]), 0, X, mesh), split(fd.define_tensor([8, 4]), 0, Y, mesh)
        columns = split(fd.define_tensor([8, 4]), 1, Y, mesh)
        fd.add_output(fd.ops.add(by_x, by_y))
        fd.add_output(fd.ops.add(by_x, columns))

    assert layouts(define) == ["[x, -]", "[x, y]"]


def test_what_does_not_divide_is_not_taken_over() -> None:
    """Rows of a reshape are cut as their outer dim is, where that divides."""

    def define(fd: FusionDefinition) -> None:
        flat = fd.ops.relu(whole(fd, [3, 8]))
        fd.add_output(flat)
        fd.add_output(fd.ops.add(fd.ops.reshape(flat, [24]), split(fd.define_tensor([24]), 0)))

    assert layouts(define)[1] == "[x]"
    assert layouts(define)[0] == "[-, -]"


def bound(tv: Any, axis: int) -> Any:
    tv.outer_split(axis, 2)
    tv.axis(axis).parallelize(X)
    return tv


def test_a_tensor_has_the_mesh_of_what_it_is_made_of() -> None:
    def define(fd: FusionDefinition) -> None:
        placed = bound(fd.ops.neg(fd.ops.add(whole(fd), whole(fd))), 1)
        fd.add_output(placed)
        fd.add_output(fd.ops.relu(placed))
        fd.add_output(bound(fd.ops.abs(placed), 2))

    assert layouts(define) == ["[-, x, -]", "[-, x, -]", "[-, -, x]"]


@pytest.mark.parametrize("ranks", [[[0, 1], [0, 1, 2, 3]], []])
def test_no_mesh_or_several_to_be_bound_to(ranks: list[list[int]]) -> None:
    def define(fd: FusionDefinition) -> None:
        operands = [fd.define_tensor(SHAPE) for _ in range(2)]
        for tv, there in zip(operands, ranks, strict=False):
            tv.set_device_mesh(nvfuser.multidevice.DeviceMesh(there))
        fd.add_output(bound(fd.ops.add(*operands), 1))

    with pytest.raises(DefinitionError, match="is parallelized and has no mesh"):
        layouts(define)
