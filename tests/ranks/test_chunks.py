"""Chunks and rings on real gloo ranks: the numbers, and the matrix products that torch's profiler sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool

import meshfuse as mf
from meshfuse.sharding.data import shard

pytestmark = pytest.mark.ranks

DOUBLE, X, STREAM = mf.DataType.Double, mf.ParallelType.mesh_x, mf.ParallelType.stream
ROWS, INNER, COLUMNS = 24, 64, 64


def linear(ranks: int, notes: Callable[..., None]) -> tuple[mf.FusionDefinition, torch.Tensor, torch.Tensor]:
    """y = x w^T of [ROWS, INNER] and [COLUMNS, INNER], and the global tensors."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([ROWS, INNER], dtype=DOUBLE), fd.define_tensor([COLUMNS, INNER], dtype=DOUBLE)
        y = fd.ops.linear(x, w)
        fd.add_output(y)
        notes(fd, mf.DeviceMesh(range(ranks)), x, w, y)
    made = torch.Generator().manual_seed(5)
    return fd, *(torch.randn(n, INNER, generator=made, dtype=torch.float64) for n in (ROWS, COLUMNS))


def products(fd: mf.FusionDefinition, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """The result on this rank, and the shapes that every aten::mm of one execution had."""
    fd.execute(inputs)
    with torch.profiler.profile(record_shapes=True) as prof:
        (found,) = fd.execute(inputs)
    return found, [event.input_shapes for event in prof.events() if event.name == "aten::mm"]


def run(notes: Callable[..., None], shapes: list[list[int]]) -> None:
    """Execute twice on this rank; compare its shard with torch and the products with the expected shapes."""
    ranks, rank = mf.World.current().size, mf.World.current().rank
    fd, a, b = linear(ranks, notes)
    shardings = fd.compile().sharded.shardings
    found, seen = products(fd, [shard(a, shardings[0], rank), shard(b, shardings[1], rank)])
    torch.testing.assert_close(found, shard(F.linear(a, b), fd.output_shardings()[0], rank))
    assert seen == shapes, (seen, shapes)


def row_parallel(chunks: int, scatter: bool = False, ring: bool = False) -> None:
    """nvFuser's words: the rows of x are a stream, or those of the result a ring."""
    ranks = mf.World.current().size

    def notes(fd: Any, mesh: Any, x: Any, w: Any, y: Any) -> None:
        for t in (x, w, y):
            t.set_device_mesh(mesh)
        for t in (x, w):
            t.outer_split(1, ranks)
            t.axis(1).parallelize(X)
        if scatter:
            y.outer_split(0, ranks)
            y.axis(0).parallelize(X)
        if ring:
            y.swizzle1d(0, X)
            y.axis(0).parallelize(STREAM)
        else:
            x.outer_split(0, chunks)
            x.axis(0).parallelize(STREAM)

    n = ranks if ring else chunks
    inner, rows = INNER // ranks, ROWS // n
    made = [[rows, inner], [inner, COLUMNS]] + ([] if scatter else [[rows, COLUMNS]])
    run(notes, [made] * n)


def column_parallel(chunks: int, ring: bool = False) -> None:
    """The rows of x are gathered: by a broadcast or an all-gather per chunk, or from rank to rank."""
    ranks = mf.World.current().size

    def notes(fd: Any, mesh: Any, x: Any, w: Any, y: Any) -> None:
        for t in (x, w, y):
            t.set_device_mesh(mesh)
        for t, dim in ((x, 0), (w, 0), (y, 1)):
            t.outer_split(dim, ranks)
            t.axis(dim).parallelize(X)
        y.outer_split(0, chunks)
        if ring:
            y.swizzle1d(0, X)
        y.axis(0).parallelize(STREAM)

    rows, columns = ROWS // chunks, COLUMNS // ranks
    run(notes, [[[rows, INNER], [INNER, columns], [rows, columns]]] * chunks)


CASES = [
    (row_parallel, (3,)), (row_parallel, (6,)), (row_parallel, (3, True)), (row_parallel, (2, True, True)),
    (column_parallel, (2,)), (column_parallel, (8,)), (column_parallel, (4, True)), (column_parallel, (8, True)),
]  # fmt: skip


@pytest.mark.parametrize(("case", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_two_ranks(ranks2: RankPool, case: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    ranks2.run(case, *arguments)


@pytest.mark.parametrize(("case", "arguments"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_four_ranks(ranks4: RankPool, case: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    ranks4.run(case, *arguments)
