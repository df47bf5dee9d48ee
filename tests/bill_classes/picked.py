"""Classes of programs that read parts of products: columns of weights, rows of one token; figures as in `general`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import layers
from layers import Sizes, Tensor, floats
from programs import TP8, Fd, outputs, split

import meshfuse as mf

from .known import Classes

CLASSES = Classes()
known = CLASSES.known


def named(build: Callable[[Fd, Sizes], None], name: str) -> Callable[[Fd, Sizes], None]:
    build.__name__ = name.replace(" ", "_")
    return build


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


@known(34.61, 19.21, gflop=2.15 + 8.59 + 8.59)
def grouped_heads_of_one_sequence_in_one_product(fd: Fd, s: Sizes) -> None:
    """Parts of the weight go to groups of two ranks with 4 heads of q each, heads to rows, and the rows to all.

    By hand every rank then has the whole last product; q, k and v and the attention are split over all of them.
    """
    x, w = floats(fd, 1, s.tokens, s.width), floats(fd, s.width, 2 * s.width)
    out = floats(fd, s.width, s.width)
    q, k, v = columns(fd, fd.ops.matmul(x, w), [s.width, s.width // 2, s.width // 2])
    y = x + fd.ops.matmul(merged(fd, s, q, k, v), out)
    outputs(fd, y)
    split(fd, TP8, (w, [None, "tp"]), (out, ["tp", None]), (y, [None] * 3))


def picked_in(how: str, fd: Fd, t: Tensor, dim: int, index: Tensor | None) -> Tensor:
    """The last row of a dim, or the rows of an index."""
    if how == "slice":
        first = [0] * t.ndim
        first[dim] = t.type.shape[dim] - 1
        return fd.ops.slice(t, first, list(t.type.shape))
    if how == "select":
        return fd.ops.broadcast(fd.ops.select(t, -1, dim), [d == dim for d in range(t.ndim)])
    assert index is not None
    if how == "index_select":
        return fd.ops.index_select(t, index, dim)
    alike = fd.ops.broadcast(index, [False, *[True] * (t.ndim - 1)])
    if how == "take expanded":
        alike = fd.ops.expand(alike, [t.type.shape[0], *[n if d + 1 != dim else 1 for d, n in
                                                       enumerate(t.type.shape[1:])]])  # fmt: skip
    return fd.ops.take_along_axis(t, alike, dim)


def of_one_token(how: str) -> Callable[[Fd, Sizes], None]:
    def build(fd: Fd, s: Sizes) -> None:
        x, qkv = floats(fd, s.batch, s.length, s.width), [floats(fd, s.width, s.width) for _ in range(3)]
        out, w1, w2 = floats(fd, s.width, s.width), floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
        head = floats(fd, s.width, s.vocab)
        places = {"index_select": [1], "take": [s.batch], "take expanded": [s.batch]}.get(how)
        index = fd.define_tensor(places, dtype=mf.DataType.Int) if places else None
        q, k, v = (fd.ops.matmul(fd.ops.rms_norm(x, [s.width]), w) for w in qkv)
        middle = x + fd.ops.matmul(merged(fd, s, q, k, v), out)
        y = middle + layers.mlp(fd, fd.ops.rms_norm(middle, [s.width]), w1, w2)
        outputs(fd, fd.ops.matmul(fd.ops.squeeze(picked_in(how, fd, y, 1, index), [1]), head))
        split(fd, TP8, *((w, [None, "tp"]) for w in (*qkv, w1, head)), *((w, ["tp", None]) for w in (out, w2)))

    return build


# Of attention's result and the MLP only the last token's rows are summed over ranks: 2 AR of [B, 1, D].
for how in ("slice", "select", "index_select", "take", "take expanded"):
    known(58.72, 0.1148)(named(of_one_token(how), f"logits_of_one_token_by_{how}"))
