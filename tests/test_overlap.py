"""Chunked ops and moves: equal to unsharded torch however they are cut, and cut as asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfuse as mf
from cut_programs import Body, check, column_parallel, defined, line, overlap, ran, row_parallel, stream
from meshfuse.definition.tensor_view import TensorView
from meshfuse.lowering.instructions import Launch, SendRecv
from meshfuse.ops.values import TensorRef
from meshfuse.testing import annotations, assert_same_as_unsharded, definitions, inputs_for

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


@pytest.mark.slow
@settings(max_examples=30)
@given(definitions(min_ops=3, max_ops=10).flatmap(annotations), st.data())
def test_any_tensor_of_any_program_may_be_cut(fd: mf.FusionDefinition, data: st.DataObject) -> None:
    made = [i for i, t in enumerate(fd.recording.tensors) if t.type.ndim]
    for i in data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique=True)) if made else ():
        tensor = TensorView(fd, TensorRef(i))
        dim, chunks = data.draw(st.integers(0, tensor.ndim - 1)), data.draw(st.integers(1, 5))
        fd.overlap(tensor, chunks, dim=dim, ring=data.draw(st.booleans()))
    assert_same_as_unsharded(fd, inputs_for(fd))


# what is run ------------------------------------------------------------------------------------------------------


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
    inputs = [
        torch.randn(fd.recording.tensors[ref.id].type.shape, generator=made).to(dtype) for ref in fd.recording.inputs
    ]
    exact = F.linear(*(t.double() for t in inputs))
    (found,) = fd.simulate(inputs, check_replicas=True)
    step = torch.finfo(dtype).eps * exact.abs() / 2 + 1e-6
    assert found.dtype is dtype and bool(((found.double() - exact).abs() <= step).all())
    assert messages(fd) == {"float32"}


def test_long_messages_keep_their_type() -> None:
    fd = half_ring(2, mf.DataType.BFloat16, 2**15, False)
    assert messages(fd) == {"bfloat16"}
    inputs = [
        torch.randint(-1, 2, fd.recording.tensors[ref.id].type.shape).to(torch.bfloat16) for ref in fd.recording.inputs
    ]
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


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("chunks", [2, 6])
def test_chunks_that_are_gathered_along_another_dim_are_parts_of_the_result(ranks: int, chunks: int) -> None:
    """Of one row they come as they lie there; of more, rows have to be put together of the ranks' columns."""

    def notes(fd: Any, x: Any, y: Any) -> None:
        fd.mesh_split(x, line(ranks), [None, "tp"])
        fd.mesh_split(y, line(ranks), [None, None])
        fd.overlap(y, chunks)

    fd = defined([(6, 4 * ranks)], lambda fd, x: fd.ops.exp(x), notes)
    check(fd, torch.exp)
    assert ran(fd) == "kg" * chunks
    assert ("movedim" in str(fd.host_program(0))) == (chunks == 2)


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


@pytest.mark.parametrize("split", ["nothing", "columns", "weight"])
@pytest.mark.parametrize("op", ["linear", "matmul"])
@pytest.mark.parametrize(
    ("rows", "dim"),
    [(rows, dim) for rows in ((), (1,), (6,), (2, 6), (1, 6), (2, 1, 6), (2, 4, 1), (2, 4, 3))
     for dim in range(len(rows) + 1)],
)  # fmt: skip
def test_products_of_any_rank_are_written_into_parts_of_the_result(
    op: str, rows: tuple[int, ...], dim: int, split: str
) -> None:
    """Chunks of all dims but the first do not lie behind each other: torch must not resize them, nor take them for one
    matrix where those of the operand, received by themselves, are one.
    """

    def body(fd: Any, x: Any, w: Any) -> Any:
        return getattr(fd.ops, op)(x, w if op == "linear" else fd.ops.permute(w, [1, 0]))

    def notes(fd: Any, x: Any, w: Any, y: Any) -> None:
        fd.overlap(y, 3, dim=dim)
        if split != "nothing":
            fd.mesh_split(x, line(2), [*[None] * len(rows), "tp"])
            fd.mesh_split(w, line(2), [None, "tp" if split == "weight" else None])
            fd.mesh_split(y, line(2), [None] * y.ndim)

    check(defined([(*rows, 4), (6, 4)], body, notes), F.linear)


# what cannot be cut -----------------------------------------------------------------------------------------------


def test_an_op_that_needs_the_dim_whole_runs_whole_and_says_why() -> None:
    fd = defined([(4, 6)], lambda fd, x: fd.ops.argsort(x, 0), lambda fd, x, y: fd.overlap(y, 2, dim=0))
    text = str(fd.compile().segmented.overlapped)
    assert "not chunked, as argsort needs dim 0 whole" in text
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
# tensors x2: v0, v1
import torch
import torch.nn.functional as F
import meshfuse.kernels as K
M = meshfuse.runtime.buffers.device_memory(device)
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
