"""Slices of products taken of their operands: columns of weights, rows that are read; figures as in bill_classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import layers
import pytest
from layers import Sizes, Tensor, floats
from programs import TP8, Fd, outputs, split

import meshfuse as mf
from bill_known import Classes, check_run
from defining import graph_of
from meshfuse.rewriting.picked import Picked

CLASSES = Classes()
known = CLASSES.known


def columns(fd: Fd, rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """The parts of a product's columns."""
    starts, (batch, length, _) = [sum(widths[:i]) for i in range(len(widths))], rows.type.shape
    return [fd.ops.slice(rows, [0, 0, a], [batch, length, a + n]) for a, n in zip(starts, widths, strict=True)]


def heads(fd: Fd, s: Sizes, rows: Tensor) -> Tensor:
    batch, length, width = rows.type.shape
    return fd.ops.permute(fd.ops.reshape(rows, [batch, length, width // s.head, s.head]), [0, 2, 1, 3])


def merged(fd: Fd, s: Sizes, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = fd.ops.permute(fd.ops.sdpfa_fwd(*(heads(fd, s, t) for t in (q, k, v)), is_causal=True)[0], [0, 2, 1, 3])
    return fd.ops.reshape(mixed, list(q.type.shape))


@known(70.78, 30.75)
def attention_and_mlp_of_one_product(fd: Fd, s: Sizes) -> None:
    """As in PaLM: q, k, v and the MLP's hidden rows are columns of one product, and both results operands of one. Parts
    of both weights go to their quarters of ranks, 9.8; the result's sums in two halves of the rows, 20.97.
    """
    x, w = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, 3 * s.width + s.hidden)
    out = floats(fd, s.width + s.hidden, s.width)
    q, k, v, hidden = columns(fd, fd.ops.matmul(x, w), [s.width] * 3 + [s.hidden])
    y = x + fd.ops.matmul(fd.ops.cat([merged(fd, s, q, k, v), fd.ops.gelu(hidden)], 2), out)
    outputs(fd, y)
    split(fd, TP8, (w, [None, "tp"]), (out, ["tp", None]), (y, [None] * 3))


@known(34.61, 19.21)
def grouped_heads_of_one_sequence_in_one_product(fd: Fd, s: Sizes) -> None:
    """Parts of the weight go to groups of two ranks with 4 heads of q each, heads to rows, and the rows to all."""
    x, w = floats(fd, 1, s.tokens, s.width), floats(fd, s.width, 2 * s.width)
    out = floats(fd, s.width, s.width)
    q, k, v = columns(fd, fd.ops.matmul(x, w), [s.width, s.width // 2, s.width // 2])
    y = x + fd.ops.matmul(merged(fd, s, q, k, v), out)
    outputs(fd, y)
    split(fd, TP8, (w, [None, "tp"]), (out, ["tp", None]), (y, [None] * 3))


@known(58.72, 0.1148)
def logits_of_the_last_token_after_a_layer(fd: Fd, s: Sizes) -> None:
    """Of attention's result and the MLP only the last token's rows are summed over ranks: 2 AR of [B, 1, D]."""
    x, qkv = floats(fd, s.batch, s.length, s.width), [floats(fd, s.width, s.width) for _ in range(3)]
    out, w1, w2 = floats(fd, s.width, s.width), floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
    head = floats(fd, s.width, s.vocab)
    q, k, v = (fd.ops.matmul(fd.ops.rms_norm(x, [s.width]), w) for w in qkv)
    middle = x + fd.ops.matmul(merged(fd, s, q, k, v), out)
    y = middle + layers.mlp(fd, fd.ops.rms_norm(middle, [s.width]), w1, w2)
    last = fd.ops.slice(y, [0, s.length - 1, 0], [s.batch, s.length, s.width])
    outputs(fd, fd.ops.matmul(fd.ops.squeeze(last, [1]), head))
    split(fd, TP8, *((w, [None, "tp"]) for w in (*qkv, w1, head)), *((w, ["tp", None]) for w in (out, w2)))


test_no_more_than_xla_and_a_plan_by_hand = CLASSES.test()


def sliced(fd: Fd, of: str) -> None:
    """A product of which columns 2 to 6 and rows 1 to 5 in twos are read, and perhaps something else."""
    x, w = fd.define_tensor([8, 16]), fd.define_tensor([16, 8])
    p = fd.ops.matmul(x, w)
    q = fd.ops.relu(p) if of == "relu" else p
    outputs(fd, fd.ops.slice(q, [0, 2], [8, 6]), fd.ops.slice(q, [1, 0], [5, 8], [2, 1]))
    if of == "read by more":
        outputs(fd, fd.ops.sum(p, [0]))
    if of == "annotated":
        split(fd, TP8, (p, ["tp", None]))
    split(fd, TP8, (w, [None, "tp"]))


WRITTEN = [("product", True), ("relu", True), ("read by more", False), ("annotated", False)]


@pytest.mark.parametrize("of, changed", WRITTEN)
def test_what_else_is_read_or_annotated_is_not_written_otherwise(of: str, changed: bool) -> None:
    with mf.FusionDefinition() as fd:
        sliced(fd, of)
    graph = graph_of(fd)
    written = Picked()(graph)
    assert (written is not graph) == changed
    shapes = {node.call.results[0].shape for node in written.nodes if node.name == "matmul"}
    assert shapes == ({(8, 4), (2, 8)} if changed else {(8, 8)})
    check_run(fd)


def test_slices_of_what_is_not_summed_stay() -> None:
    """And so do those of what is put together, or cut along two dims at once."""
    with mf.FusionDefinition() as fd:
        x, w = fd.define_tensor([8, 16]), fd.define_tensor([16, 8])
        outputs(fd, fd.ops.slice(fd.ops.relu(x), [0, 0], [4, 16]))
        outputs(fd, fd.ops.slice(fd.ops.matmul(x, w), [0, 0], [4, 4]))
        outputs(fd, fd.ops.slice(fd.ops.reshape(fd.ops.matmul(x, w), [64]), [8], [24]))
    graph = graph_of(fd)
    assert Picked()(graph) is graph and math.isfinite(fd.bill().total)
