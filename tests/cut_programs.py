"""Programs whose ops and moves are cut into chunks, how tests ask for that, and what is then run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import meshfuse as mf
from meshfuse.lowering.instructions import CommunicationCall, Launch
from meshfuse.testing import assert_same_as_unsharded

DOUBLE, X = mf.DataType.Double, mf.ParallelType.mesh_x
Body = Callable[..., Any]


def line(size: int) -> mf.DeviceMesh:
    return mf.DeviceMesh((size,), ("tp",))


def defined(shapes: Sequence[Sequence[int]], body: Body, notes: Body) -> mf.FusionDefinition:
    """Doubles in; `body` gives the outputs, `notes` annotates inputs and outputs."""
    with mf.FusionDefinition() as fd:
        tensors = [fd.define_tensor(list(shape), dtype=DOUBLE) for shape in shapes]
        made = body(fd, *tensors)
        outputs = made if isinstance(made, tuple) else (made,)
        for out in outputs:
            fd.add_output(out)
        notes(fd, *tensors, *outputs)
    return fd


def check(fd: mf.FusionDefinition, reference: Callable[..., Any]) -> None:
    """All replicas of all outputs are what torch makes of the whole tensors."""
    made = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(fd.recording.tensors[ref.id].type.shape, generator=made, dtype=torch.float64)
        for ref in fd.recording.inputs
    ]
    expected = reference(*inputs)
    assert_same_as_unsharded(fd, inputs, expected if isinstance(expected, tuple) else (expected,))


def row_parallel(rows: int, ranks: int, scatter: bool, ask: Body, bias: bool = False) -> mf.FusionDefinition:
    """x and w split over the summed dim; the result whole, or its rows over the ranks."""

    def notes(fd: Any, x: Any, w: Any, *rest: Any) -> None:
        fd.mesh_split(x, line(ranks), [None, "tp"])
        fd.mesh_split(w, line(ranks), [None, "tp"])
        fd.mesh_split(rest[-1], line(ranks), ["tp" if scatter else None, None])
        ask(fd, rest[-1])

    shapes = [(rows, 2 * ranks), (3, 2 * ranks), *([(3,)] if bias else [])]
    return defined(shapes, lambda fd, *t: fd.ops.linear(*t), notes)


def column_parallel(rows: int, ranks: int, ask: Body, readers: bool = False) -> mf.FusionDefinition:
    """x's rows over the ranks are gathered; w's and the result's columns stay split. `readers`: others read x too."""

    def body(fd: Any, x: Any, w: Any) -> Any:
        y = fd.ops.linear(x, w)
        return (y, fd.ops.tanh(y), fd.ops.exp(x), fd.ops.set(x)) if readers else (y,)

    def notes(fd: Any, x: Any, w: Any, y: Any, *rest: Any) -> None:
        fd.mesh_split(x, line(ranks), ["tp", None])
        fd.mesh_split(w, line(ranks), ["tp", None])
        fd.mesh_split(y, line(ranks), [None, "tp"])
        for t in rest[1:]:
            fd.mesh_split(t, line(ranks), [None, None])
        ask(fd, y)

    return defined([(rows, 4), (3 * ranks, 4)], body, notes)


def overlap(chunks: int, **options: Any) -> Body:
    return lambda fd, t: fd.overlap(t, chunks, **options)


def stream(chunks: int, ring: bool = False) -> Body:
    """nvFuser's words: a split of the rows is a stream, perhaps one that begins at each rank's own place.

    Rows that are split over ranks are a stream as they are in a ring, and inside the ranks' shards else.
    """

    def ask(fd: Any, t: Any) -> None:
        bound = t.axis(0).is_device_dim()
        if not (bound and ring):
            t.outer_split(int(bound), chunks)
        if ring:
            t.swizzle1d(0, X)
        t.axis(int(bound and not ring)).parallelize(mf.ParallelType.stream)

    return ask


def ran(fd: mf.FusionDefinition, rank: int = 0) -> str:
    """The program's kernels and communications in order: k for a kernel, else the first letters."""
    kinds = {"all_reduce": "r", "all_gather": "g", "all_to_all": "a", "broadcast": "b", "send": "s", "recv": "v"}
    out = ""
    for ins in fd.compile().host_program(rank).instructions:
        out += "k" if isinstance(ins, Launch) else kinds[ins.kind] if isinstance(ins, CommunicationCall) else ""
    return out
