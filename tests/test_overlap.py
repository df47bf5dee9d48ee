"""Chunked ops and moves: equal to unsharded torch however they are cut, and cut as asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from meshfuse.definition.tensor_view import TensorView
from meshfuse.host_ir.instructions import Collective, Launch, SendRecv
from meshfuse.ops.base import TensorRef
from meshfuse.testing import annotations, assert_same_as_unsharded, definitions, inputs_for

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
    inputs = [torch.randn(fd.tensors[ref.id].type.shape, generator=made, dtype=torch.float64) for ref in fd.inputs]
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


ASKS = {
    "overlap": overlap, "ring": lambda n: overlap(n, ring=True), "columns": lambda n: overlap(n, dim=1),
    "stream": stream, "ring stream": lambda n: stream(n, True),
}  # fmt: skip
PROGRAMS: dict[str, tuple[Callable[[int, int, Body], mf.FusionDefinition], Callable[..., Any]]] = {
    "all-reduce": (lambda rows, ranks, ask: row_parallel(rows, ranks, False, ask), F.linear),
    "all-reduce with bias": (lambda rows, ranks, ask: row_parallel(rows, ranks, False, ask, True), F.linear),
    "reduce-scatter": (lambda rows, ranks, ask: row_parallel(rows, ranks, True, ask), F.linear),
    "all-gather": (column_parallel, F.linear),
    "read by others": (
        lambda rows, ranks, ask: column_parallel(rows, ranks, ask, True),
        lambda x, w: (F.linear(x, w), torch.tanh(F.linear(x, w)), torch.exp(x), x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("ask", ASKS)
@settings(max_examples=6)
@given(st.integers(1, 13), st.sampled_from([1, 2, 3, 4]), st.integers(1, 14))
def test_any_cut_gives_the_same_numbers(program: str, ask: str, rows: int, ranks: int, chunks: int) -> None:
    """Chunks that do not divide the rows, more of them than rows, one alone; ranks that do not divide them."""
    make, reference = PROGRAMS[program]
    check(make(rows, ranks, ASKS[ask](chunks)), reference)


@settings(max_examples=60)
@given(definitions(min_ops=3, max_ops=10).flatmap(annotations), st.data())
def test_any_tensor_of_any_program_may_be_cut(fd: mf.FusionDefinition, data: st.DataObject) -> None:
    made = [i for i, t in enumerate(fd.tensors) if t.type.ndim]
    for i in data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique=True)) if made else ():
        tensor = TensorView(fd, TensorRef(i))
        dim, chunks = data.draw(st.integers(0, tensor.ndim - 1)), data.draw(st.integers(1, 5))
        fd.overlap(tensor, chunks, dim=dim, ring=data.draw(st.booleans()))
    assert_same_as_unsharded(fd, inputs_for(fd))


# what is run ------------------------------------------------------------------------------------------------------


def ran(fd: mf.FusionDefinition, rank: int = 0) -> str:
    """The program's kernels and communications in order: k for a kernel, else the first letters."""
    kinds = {"all_reduce": "r", "all_gather": "g", "all_to_all": "a", "broadcast": "b", "send": "s", "recv": "v"}
    out = ""
    for ins in fd.compile().host_program(rank).instructions:
        out += "k" if isinstance(ins, Launch) else kinds[ins.kind] if isinstance(ins, (Collective, SendRecv)) else ""
    return out


@pytest.mark.parametrize(
    ("fd", "wanted"),
    [
        (row_parallel(6, 2, False, overlap(3)), "krkrkr"),
        (row_parallel(6, 2, False, stream(3)), "krkrkr"),
        (row_parallel(6, 2, True, overlap(3)), "kakaka"),
        (row_parallel(8, 4, True, overlap(4, ring=True)), "ksvksvksvk"),
        (column_parallel(8, 4, overlap(2)), "ggkk"),
        (column_parallel(8, 4, stream(4)), "bbbbkkkk"),
        (column_parallel(8, 4, stream(8)), "bbbbbbbbkkkkkkkk"),
        (column_parallel(8, 4, stream(4, ring=True)), "svksvksvkk"),
        (row_parallel(2, 2, False, overlap(5)), "krkr"),
        (row_parallel(6, 2, False, overlap(1)), "kr"),
    ],
)
def test_each_chunk_is_computed_and_communicated_by_itself(fd: mf.FusionDefinition, wanted: str) -> None:
    assert ran(fd) == wanted


def test_a_ring_begins_at_each_ranks_own_shard() -> None:
    fd = column_parallel(8, 4, overlap(4, ring=True))
    for rank in range(4):
        launches = [i for i in fd.compile().host_program(rank).instructions if isinstance(i, Launch)]
        assert [i.note for i in launches] == [f"chunk {(rank + turn) % 4 + 1} of 4" for turn in range(4)]


def half_ring(ranks: int, kind: mf.DataType, inner: int, bias: bool) -> mf.FusionDefinition:
    """y = x w^T, its rows over the ranks and the summed dim too, in a ring of 16-bit floats."""
    with mf.FusionDefinition() as fd:
        x, w = (
            fd.define_tensor([2 * ranks, inner * ranks], dtype=kind),
            fd.define_tensor([5, inner * ranks], dtype=kind),
        )
        y = fd.ops.linear(x, w, fd.define_tensor([5], dtype=kind) if bias else None)
        fd.add_output(y)
        for t, spec in ((x, [None, "tp"]), (w, [None, "tp"]), (y, ["tp", None])):
            fd.mesh_split(t, line(ranks), spec)
        fd.overlap(y, ranks, ring=True)
    return fd


def messages(fd: mf.FusionDefinition) -> set[str]:
    """The types of what ranks send each other."""
    return {i.payload[1] for i in fd.compile().host_program(0).instructions if isinstance(i, SendRecv)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [mf.DataType.BFloat16, mf.DataType.Half])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_that_go_round_in_short_messages_are_rounded_once(ranks: int, kind: mf.DataType, bias: bool) -> None:
    """Terms that cancel: sums of rounded ones would be off by many of the result's own steps."""
    fd, made = half_ring(ranks, kind, 16, bias), torch.Generator().manual_seed(3)
    dtype = getattr(torch, kind.value)
    inputs = [torch.randn(fd.tensors[ref.id].type.shape, generator=made).to(dtype) for ref in fd.inputs]
    exact = F.linear(*(t.double() for t in inputs))
    (found,) = fd.simulate(inputs, check_replicas=True)
    step = torch.finfo(dtype).eps * exact.abs() / 2 + 1e-6
    assert found.dtype is dtype and bool(((found.double() - exact).abs() <= step).all())
    assert messages(fd) == {"float32"}


def test_long_messages_keep_their_type() -> None:
    fd = half_ring(2, mf.DataType.BFloat16, 2**15, False)
    assert messages(fd) == {"bfloat16"}
    inputs = [torch.randint(-1, 2, fd.tensors[ref.id].type.shape).to(torch.bfloat16) for ref in fd.inputs]
    exact = F.linear(*(t.float() for t in inputs))
    torch.testing.assert_close(fd.simulate(inputs)[0].float(), exact, rtol=2e-2, atol=2.0)


def test_a_result_over_two_axes_is_cut_within_its_shards() -> None:
    """Rows over dp stay where they are: each rank cuts its own."""
    mesh = mf.DeviceMesh((2, 2), ("dp", "tp"))

    def notes(fd: Any, x: Any, w: Any, y: Any) -> None:
        fd.mesh_split(x, mesh, ["dp", "tp"])
        fd.mesh_split(w, mesh, [None, "tp"])
        fd.mesh_split(y, mesh, ["dp", None])
        fd.overlap(y, 2)

    fd = defined([(8, 4), (3, 4)], lambda fd, x, w: fd.ops.linear(x, w), notes)
    check(fd, F.linear)
    assert [ran(fd, rank) for rank in range(4)] == ["krkr"] * 4


def test_gather_product_and_scatter_in_one_loop() -> None:
    """The rows of the next chunk are gathered before those of this one are reduced."""

    def notes(fd: Any, x: Any, w: Any, y: Any) -> None:
        fd.mesh_split(x, mesh, ["tp", "dp"])
        fd.mesh_split(w, mesh, [None, "dp"])
        fd.mesh_split(y, mesh, [None, None])
        fd.overlap(y, 2)

    mesh = mf.DeviceMesh((2, 2), ("dp", "tp"))
    fd = defined([(8, 4), (3, 4)], lambda fd, x, w: fd.ops.linear(x, w), notes)
    check(fd, F.linear)


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


@pytest.mark.parametrize("op", ["linear", "matmul"])
@pytest.mark.parametrize("rows", [(), (1,), (6,), (2, 6), (2, 1, 6)])
@pytest.mark.parametrize("dim", [0, -1])
def test_products_of_any_rank_are_written_into_parts_of_the_result(op: str, rows: tuple[int, ...], dim: int) -> None:
    """Chunks of the last dim do not lie behind each other: torch must not resize them."""

    def body(fd: Any, x: Any, w: Any) -> Any:
        return getattr(fd.ops, op)(x, w if op == "linear" else fd.ops.permute(w, [1, 0]))

    fd = defined([(*rows, 4), (6, 4)], body, lambda fd, x, w, y: fd.overlap(y, 3, dim=dim % y.ndim))
    check(fd, F.linear)


# what cannot be cut -----------------------------------------------------------------------------------------------


def test_an_op_that_needs_the_dim_whole_runs_whole_and_says_why() -> None:
    fd = defined([(4, 6)], lambda fd, x: fd.ops.argsort(x, 0), lambda fd, x, y: fd.overlap(y, 2, dim=0))
    said = str(fd.compile().segmented.overlapped)
    assert "not chunked, as argsort needs dim 0 whole" in said
    assert "not chunked" in fd.explain(TensorView(fd, TensorRef(1)))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("between", ["", "set", "neg"])
def test_a_product_of_a_tensor_with_itself_is_not_cut(dim: int, between: str) -> None:
    """A product takes the chunk of one operand and the whole of the other: the chunk must not stand for both."""

    def gram(fd: Any, x: Any) -> Any:
        left = getattr(fd.ops, between)(x) if between else x
        return fd.ops.matmul(left, fd.ops.permute(x, [1, 0]))

    fd = defined([(6, 4)], gram, lambda fd, x, y: fd.overlap(x, 2, dim=dim))
    check(fd, lambda x: (-x if between == "neg" else x) @ x.T)
    assert "as a whole" in str(fd.compile().segmented.overlapped) or dim == 1


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"chunks": 0}, "0"), ({"chunks": 1.5}, "1.5"), ({"chunks": True}, "True"), ({"chunks": 2, "dim": 2}, "2"),
        ({"chunks": 2, "ring": 1}, "1"),
    ],
)  # fmt: skip
def test_wrong_numbers_are_named(arguments: dict[str, Any], found: str) -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([4, 4])
    with pytest.raises(mf.DefinitionError, match=f"overlap of x.*found {found}, needed"):
        fd.overlap(x, **arguments)


def test_two_different_wishes_are_named() -> None:
    fd = mf.FusionDefinition()
    x = fd.define_tensor([4, 4])
    fd.overlap(x, 2)
    fd.overlap(x, 2)
    with pytest.raises(mf.DefinitionError, match="annotated twice"):
        fd.overlap(x, 4)


def test_a_definitions_text_asks_for_the_same() -> None:
    fd = column_parallel(8, 4, overlap(4, ring=True))
    assert "fd.overlap(t2, 4, dim=0, ring=True)" in repr(fd)


# the text ---------------------------------------------------------------------------------------------------------


def test_the_program_of_a_chunked_row_parallel_linear() -> None:
    fd = row_parallel(4, 2, False, overlap(2))
    text = "\n".join(part.split("  # t2")[0] for part in str(fd.compile().host_program(0)).splitlines())
    assert (
        text
        == """\
# rank 0
import torch
import torch.nn.functional as F
import meshfuse.kernels as K
M = meshfuse.executor.buffers.memory_of(device)
group_0_1 = world.group((0, 1))

@torch.no_grad()
def loop_0(v0, v1, v2):
    torch.matmul(v0, v1.t(), out=v2)

def main(v0, v1, seed=0, offset=0):
    v3 = M.empty((4, 3), torch.float64)
    v0_0 = v0[0:2]
    v3_0 = v3[0:2]  # chunk 1 of 2
    loop_0(v0_0, v1, v3_0)  # chunk 1 of 2
    del v0_0
    w3_0 = group_0_1.all_reduce(v3_0, 'sum')
    v0_1 = v0[2:4]
    del v0
    v3_1 = v3[2:4]  # chunk 2 of 2
    loop_0(v0_1, v1, v3_1)  # chunk 2 of 2
    del v0_1, v1
    w3_1 = group_0_1.all_reduce(v3_1, 'sum')
    w3_0.wait()
    del v3_0, w3_0
    w3_1.wait()
    del v3_1, w3_1
    return (v3, )"""
    )
