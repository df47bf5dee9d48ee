"""Streams: how far what is cut goes on, through products in a row and the moves between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshfuse as mf
from cut_programs import Body, X, check, defined, line, overlap, ran, stream


@pytest.mark.parametrize(("shape", "shard", "wanted"), [((3, 2, 2, 2), 1, "gggkkk"), ((2, 2, 2), 0, "bbkk")])
def test_a_stream_outside_the_shards_and_one_of_the_shards_themselves(
    shape: tuple[int, ...], shard: int, wanted: str
) -> None:
    """nvFuser's MultiDeviceExecutor: the result's first dim is a stream, x is sharded over the second or the first."""

    def notes(fd: Any, x: Any, w: Any, y: Any) -> None:
        for t in (x, w, y):
            t.set_device_mesh(mf.DeviceMesh([0, 1]))
        x.axis(shard).parallelize(X)
        y.axis(0).parallelize(mf.ParallelType.stream)

    fd = defined([shape, (8, 2)], lambda fd, x, w: fd.ops.linear(x, w), notes)
    check(fd, F.linear)
    assert ran(fd) == wanted


def test_a_stream_on_one_rank_and_no_mesh_cuts_the_product() -> None:
    def notes(fd: Any, x: Any, w: Any, y: Any) -> None:
        y.outer_split(0, 3)
        y.axis(0).parallelize(mf.ParallelType.stream)

    fd = defined([(15, 7), (7, 2)], lambda fd, x, w: fd.ops.matmul(x, w), notes)
    check(fd, torch.matmul)
    with torch.profiler.profile(record_shapes=True) as prof:
        fd.simulate([torch.ones(15, 7, dtype=torch.float64), torch.ones(7, 2, dtype=torch.float64)])
    seen = [event.input_shapes for event in prof.events() if event.name == "aten::mm"]
    assert seen == [[[5, 7], [7, 2], [5, 2]]] * 3


def test_a_chain_of_streamed_tensors_is_one_loop() -> None:
    def notes(fd: Any, x: Any, w: Any, gathered: Any, y: Any) -> None:
        for t, spec in ((x, ["tp", None]), (w, ["tp", None]), (gathered, [None, None]), (y, [None, "tp"])):
            fd.mesh_split(t, line(2), spec)
        for t in (gathered, y):
            fd.overlap(t, 2)

    def body(fd: Any, x: Any, w: Any) -> Any:
        gathered = fd.ops.set(x)
        return gathered, fd.ops.linear(gathered, w)

    fd = defined([(4, 4), (6, 4)], body, notes)
    check(fd, lambda x, w: (x, F.linear(x, w)))
    assert len(fd.compile().segmented.overlapped.loops) == 1


def products(fd: mf.FusionDefinition, *inputs: torch.Tensor) -> list[list[list[int]]]:
    """The shapes of all matrix products of one simulated execution."""
    with torch.profiler.profile(record_shapes=True) as prof:
        fd.simulate(list(inputs))
    return [event.input_shapes for event in prof.events() if event.name == "aten::mm"]


def chain(length: int, notes: Body) -> mf.FusionDefinition:
    """x and `length` weights, up and down in turn: products in a row, a relu between each two."""

    def body(fd: Any, x: Any, *weights: Any) -> Any:
        for place, w in enumerate(weights):
            x = fd.ops.matmul(fd.ops.relu(x) if place else x, w)
        return x

    return defined([(6, 4), *[(4, 16), (16, 4)] * (length // 2)], body, notes)


def chained(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for place, w in enumerate(weights):
        x = (x.relu() if place else x) @ w
    return x


def ones(length: int) -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=torch.float64) for shape in ((6, 4), *[(4, 16), (16, 4)] * (length // 2))]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("length", [2, 6])
def test_a_stream_of_an_input_goes_on_through_all_products(length: int, split: bool) -> None:
    """nvFuser's stream runs on through what is made of the tensor, all-reduces in between included."""

    def notes(fd: Any, x: Any, *rest: Any) -> None:
        for place, t in enumerate((x, *rest)) if split else ():
            layer = [["tp", None], [None, "tp"]][place % 2]
            fd.mesh_split(t, line(2), layer if 0 < place < length + 1 else [None, None])
        x.outer_split(0, 3)
        x.axis(0).parallelize(mf.ParallelType.stream)

    fd = chain(length, notes)
    check(fd, chained)
    made = products(fd, *ones(length))
    assert [shapes[0][0] for shapes in made] == [2] * (3 * length * (1 + split))
    assert {tuple(shapes[1]) for shapes in made} == ({(4, 8), (8, 4)} if split else {(4, 16), (16, 4)})
    assert len(fd.compile().segmented.overlapped.loops) == 1
    assert ran(fd).count("r") == (3 * length // 2 if split else 0)


def test_a_stream_ends_where_another_begins() -> None:
    def notes(fd: Any, x: Any, u: Any, v: Any, y: Any) -> None:
        for t, chunks in ((x, 3), (y, 2)):
            t.outer_split(0, chunks)
            t.axis(0).parallelize(mf.ParallelType.stream)

    fd = chain(2, notes)
    check(fd, chained)
    made = products(fd, *ones(2))
    assert [shapes[0][0] for shapes in made] == [2, 2, 2, 3, 3]


@pytest.mark.parametrize("words", [stream, overlap])
@pytest.mark.parametrize("dims", [(0, 1), (0, None), (None, 1), (0, 0), (1, 1), (1, 0)])
def test_two_products_that_are_cut_along_dims_of_their_own(words: Body, dims: tuple[int | None, int | None]) -> None:
    """Rows of the first operand, columns of the last: no loop takes a tensor whole and in chunks."""

    def notes(fd: Any, x: Any, u: Any, v: Any, y: Any) -> None:
        for t, dim in zip((x, v), dims, strict=True):
            if dim is not None and words is overlap:
                fd.overlap(t, 3, dim=dim)
            elif dim is not None:
                t.outer_split(dim, 3)
                t.axis(dim).parallelize(mf.ParallelType.stream)

    fd = defined([(6, 4), (4, 12), (12, 9)], lambda fd, x, u, v: fd.ops.matmul(fd.ops.matmul(x, u), v), notes)
    check(fd, lambda x, u, v: x @ u @ v)
    made = products(fd, *(torch.ones(s, dtype=torch.float64) for s in ((6, 4), (4, 12), (12, 9))))
    if dims == (0, 1):
        assert [shapes[:2] for shapes in made] == [[[2, 4], [4, 12]]] * 3 + [[[6, 12], [12, 3]]] * 3


def test_what_fd_overlap_names_alone_is_cut() -> None:
    fd = chain(2, lambda fd, x, *rest: fd.overlap(x, 3))
    check(fd, chained)
    made = products(fd, *ones(2))
    assert [shapes[0][0] for shapes in made] == [2, 2, 2, 6]


@pytest.mark.parametrize(("ring", "wanted"), [(False, "kbbbbkkkkkkk"), (True, "ksvksvksvkk")])
def test_a_stream_of_a_gathered_set_cuts_the_product_that_reads_it(ring: bool, wanted: str) -> None:
    """The next chunk is gathered before the product of this one."""

    def notes(fd: Any, x: Any, w: Any, gathered: Any, y: Any) -> None:
        for t, spec in ((x, ["tp", None]), (w, ["tp", None]), (gathered, [None, None]), (y, [None, "tp"])):
            fd.mesh_split(t, line(4), spec)
        stream(4, ring)(fd, gathered)

    def body(fd: Any, x: Any, w: Any) -> Any:
        gathered = fd.ops.set(x)
        return gathered, fd.ops.linear(gathered, w)

    fd = defined([(8, 4), (12, 4)], body, notes)
    check(fd, lambda x, w: (x, F.linear(x, w)))
    made = products(fd, torch.ones(8, 4, dtype=torch.float64), torch.ones(12, 4, dtype=torch.float64))
    assert made == [[[2, 4], [4, 3], [2, 3]]] * 16
    assert ran(fd) == wanted


@pytest.mark.parametrize(
    ("ranks", "chunks", "shapes"),
    [(2, 3, ((6, 8), (2, 8))), (4, 3, ((6, 8), (2, 8))), (8, 3, ((6, 8), (2, 8))), (8, 8, ((16, 8), (3, 8)))],
)
def test_no_axis_cuts_a_streamed_dim_unasked(ranks: int, chunks: int, shapes: tuple[tuple[int, int], ...]) -> None:
    """Rows split over ranks would save up to a tenth of the bytes at 8 ranks, and leave chunks of one row, or none."""

    def notes(fd: Any, x: Any, w: Any, y: Any) -> None:
        for t in (x, w, y):
            t.set_device_mesh(mf.DeviceMesh(list(range(ranks))))
        x.outer_split(0, chunks)
        x.axis(0).parallelize(mf.ParallelType.stream)
        for t, dim in ((x, 2), (w, 1)):
            t.outer_split(dim, ranks)
            t.axis(dim).parallelize(X)

    fd = defined(shapes, lambda fd, x, w: fd.ops.linear(x, w), notes)
    check(fd, F.linear)
    (rows, inner), (n, _) = shapes
    m, k = rows // chunks, inner // ranks
    made = products(fd, *[torch.ones(shape, dtype=torch.float64) for shape in shapes])
    assert made == [[[m, k], [k, n], [m, n]]] * chunks * ranks
