"""torch's placements that cut a dim several times (`Shard`, `_StridedShard`), against cutting indices one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import meshfuse as mf
from meshfuse.compiler import CompiledProgram, compile_definition
from meshfuse.executor.dtensor import as_dtensor, placeable, placements_of, sharding_of
from meshfuse.executor.simulate import Simulation
from meshfuse.planner.effort import Effort
from meshfuse.reshard.borders import Borders
from meshfuse.testing import meshes

MESH = mf.DeviceMesh((2, 3, 2), ("a", "b", "c"))
SIZE = 2 * 3 * 2 * 4 * 3
ONE: list[Any] = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (2, 3, 4, 6, 12))]


def cut(
    placements: tuple[Any, ...], rank: int, mesh: mf.DeviceMesh = MESH, size: int = SIZE, dim: int = 0
) -> list[int]:
    """The indices of a rank: each placement in turn cuts every one of its chunks, and the rank has a part of each."""
    held = torch.arange(size)
    for ranks, at, placement in zip(mesh.shape, mesh.coordinate(rank), placements, strict=True):
        if not placement.is_replicate() and placement.dim == dim:
            parts = [chunk.chunk(ranks) for chunk in held.chunk(getattr(placement, "split_factor", 1))]
            held = torch.cat([part[at] for part in parts if at < len(part)] or [held[:0]])
    return held.tolist()


@pytest.mark.parametrize("size", [SIZE, SIZE + 1, SIZE - 1, 37, 6, 1, 0])
@pytest.mark.parametrize("first", ONE, ids=str)
def test_ranks_hold_what_torch_cuts(first: Any, size: int) -> None:
    for placements in itertools.product([first], ONE, ONE):
        found = sharding_of(MESH, placements, (size,))
        assert found is not None
        held = {rank: cut(placements, rank, MESH, size) for rank in MESH.ranks}
        assert found.max_local_numel((size,)) == max(map(len, held.values()))
        for rank in MESH.ranks:
            (runs,) = found.runs((size,), rank)
            assert [i for low, high in runs for i in range(low, high)] == held[rank]
            assert all(a < b for a, b in runs) and all(b < c for (_, b), (c, _) in itertools.pairwise(runs))


@pytest.mark.parametrize("axes", [p for n in (1, 2, 3) for p in itertools.permutations("abc", n)], ids="".join)
def test_every_order_of_axes_has_placements(axes: tuple[str, ...]) -> None:
    layout = tuple(mf.Split(MESH.axis_size(axis), axis) for axis in axes)
    sharding, shape = mf.Sharding(MESH, (layout, ())), (SIZE, 5)
    placements = placements_of(sharding, shape)
    assert placements is not None and sharding_of(MESH, placements, shape) == sharding
    assert (axes == tuple(sorted(axes))) == (_StridedShard not in map(type, placements))


def test_free_outputs_have_orders_that_inputs_have() -> None:
    strided = (mf.Split(2, "c"), mf.Split(2, "a"))
    sharding, shape = mf.Sharding(MESH, (strided, ())), (SIZE, 5)
    assert placeable(sharding, shape, {strided}) == sharding
    plain = placements_of(placeable(sharding, shape, set()), shape)
    assert plain is not None and _StridedShard not in map(type, plain)


def test_annotated_by_strided_placements() -> None:
    placements = [_StridedShard(0, split_factor=2), Replicate(), Shard(0)]
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([SIZE, 5])
        fd.shard(x, placements, MESH)
        fd.mesh_split(x, MESH, [("c", "a"), None])  # which says the same
        fd.add_output(fd.ops.neg(x))
    assert str(fd.latest().output_shardings()[0]) == "[(c, a), -]"


# in programs


@st.composite
def placed(draw: st.DrawFn) -> tuple[mf.DeviceMesh, tuple[Any, ...], tuple[int, int]]:
    """A mesh, placements of two dims over it, and sizes, most of which its axes do not divide."""
    mesh = draw(meshes(max_ranks=12))
    dims, factors = st.integers(0, 1), st.sampled_from([k for k in mesh.shape if k > 1] or [2])
    strided = st.builds(lambda dim, k: _StridedShard(dim, split_factor=k), dims, factors)
    one = st.one_of(st.just(Replicate()), st.builds(Shard, dims), strided)
    sizes = st.tuples(st.integers(0, 13), st.integers(0, 13))
    return mesh, tuple([draw(one) for _ in mesh.shape]), draw(sizes)


def program(mesh: mf.DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, int], alike: bool) -> CompiledProgram:
    """2x, x, x x^T and the sums of rows, where x comes as DTensor has it; with `alike` 2x is annotated as x is."""
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor(list(shape), dtype=mf.DataType.Double)
        y = fd.ops.mul(x, 2.0)
        fd.shard(x, placements, mesh)
        if alike:
            fd.shard(y, placements, mesh)
        for made in (y, x, fd.ops.matmul(x, fd.ops.permute(x, [1, 0])), fd.ops.sum(x, [1])):
            fd.add_output(made)
    given = sharding_of(mesh, placements, shape)
    assert given is not None
    borders, world = Borders(placeable, as_dtensor, {0: given.dims}), mf.DeviceMesh([0])
    return compile_definition(fd.recording, {0: shape}, {}, world, effort=Effort.FAST, borders=borders)


def shard_of(value: torch.Tensor, placements: tuple[Any, ...], mesh: mf.DeviceMesh, rank: int) -> torch.Tensor:
    for dim, n in enumerate(value.shape):
        value = value.index_select(dim, torch.tensor(cut(placements, rank, mesh, n, dim), dtype=torch.int64))
    return value


@pytest.mark.fuzz
@settings(max_examples=60)
@given(placed(), st.booleans())
def test_what_torch_has_cut_comes_in_and_goes_out(case: Any, alike: bool) -> None:
    mesh, placements, shape = case
    try:
        compiled = program(mesh, placements, shape, alike)
    except mf.DefinitionError as error:  # of chunks that no later axes make
        assume("cuts chunks" not in str(error))
        raise
    compiled.verify()
    value = torch.arange(float(shape[0] * shape[1]), dtype=torch.float64).view(shape)
    simulation = Simulation([compiled.host_program(rank) for rank in compiled.ranks], torch.device("cpu"))
    found = simulation.run({rank: [shard_of(value, placements, mesh, rank)] for rank in compiled.ranks}, 0, 0)
    right = (value * 2, value, value @ value.T, value.sum(1))
    of_outputs = [placements_of(s, t.shape) for s, t in zip(compiled.output_shardings(), right, strict=True)]
    assert of_outputs[1] is not None and (not alike or of_outputs[0] == of_outputs[1])
    for rank, outputs in found.items():
        for out, whole, how in zip(outputs, right, of_outputs, strict=True):
            assert how is not None and torch.equal(out, shard_of(whole, how, mesh, rank))
