"""Classes of programs one axis of which does best as a grid: rows in groups of ranks, columns over the ranks of each;
figures as in `general`.

Of x (X bytes) over k groups of m ranks, rows come together or go apart in X / k (m - 1) / m bytes, and W bytes of
weights in W / m (k - 1) / k. Here X is 16.78 MB, the weights of an MLP 33.55 MB, and two groups of four do best.
"""

from __future__ import annotations

import math

import layers
from layers import Sizes, Tensor, floats
from programs import DP2_TP4, DP8, TP8, Fd, Spec, gradients, outputs, split

from .known import Classes, by_hand, loss_of_a_head

CLASSES = Classes()
known = CLASSES.known


def weights(fd: Fd, s: Sizes) -> tuple[Tensor, Tensor]:
    return floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)


def mlp(fd: Fd, s: Sizes, rows: Spec) -> tuple[Tensor, list[Tensor]]:
    """An MLP, its weights split as in Megatron-LM, and what it is of: x first, its rows laid as said."""
    x, w1, w2 = floats(fd, s.batch, s.length, s.width), *weights(fd, s)
    y = layers.mlp(fd, x, w1, w2)
    split(fd, TP8, (x, rows), (w1, [None, "tp"]), (w2, ["tp", None]))
    return y, [x, w1, w2]


@known(29.36, 16.78)
def rows_of_an_mlp_in_two_groups(fd: Fd, s: Sizes) -> None:
    """A split sequence: two gathers of rows among four, and one of the weights among two."""
    rows: Spec = [None, "tp", None]
    y, _ = mlp(fd, s, rows)
    outputs(fd, y)
    split(fd, TP8, (y, rows))


@known(58.72, 33.56)
def rows_of_an_mlp_in_two_groups_backward(fd: Fd, s: Sizes) -> None:
    """Four moves of rows and two of weights; the weights' gradients are scattered among two."""
    rows: Spec = [None, "tp", None]
    y, leaves = mlp(fd, s, rows)
    dx, dw1, dw2 = gradients(fd, y, leaves)
    split(fd, TP8, (y, rows), (dx, rows), (dw1, [None, "tp"]), (dw2, ["tp", None]))


@known(58.72, 41.95)
def whole_rows_of_an_mlp_in_two_groups_backward(fd: Fd, s: Sizes) -> None:
    """Rows that every rank has need not come together; x's gradient goes to all."""
    y, leaves = mlp(fd, s, [None, None, None])
    dx, dw1, dw2 = gradients(fd, y, leaves)
    split(fd, TP8, (dx, [None, None, None]), (dw1, [None, "tp"]), (dw2, ["tp", None]))


@known(58.72, 33.56)
def stored_weights_gathered_among_two(fd: Fd, s: Sizes) -> None:
    """FSDP: half of each weight is used on every rank, for half of the rows."""
    x, w1, w2 = floats(fd, s.batch, s.length, s.width), *weights(fd, s)
    made = gradients(fd, layers.mlp(fd, x, w1, w2), [w1, w2])
    split(fd, DP8, (x, ["dp", None, None]), *((t, ["dp", None]) for t in (w1, w2, *made)))


@known(14.68, 8.39)
def products_of_all_pairs_of_rows(fd: Fd, s: Sizes) -> None:
    """x xᵀ in blocks of 2 by 4: each rank gets a half and a quarter of the rows."""
    x = floats(fd, s.tokens, s.width)
    split(fd, TP8, (x, ["tp", None]))
    outputs(fd, fd.ops.matmul(x, fd.ops.permute(x, [1, 0])))


@known(math.inf, 6.554)  # XLA was not asked.
def heads_of_one_product_and_rows_that_are_free(fd: Fd, s: Sizes) -> None:
    """Columns of the first weight go to their heads by a permute, half of the second is gathered; heads go to the
    batch among four, and the sums are scattered among all.
    """
    ops = fd.ops
    x, w, out = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, 3 * s.width), floats(fd, s.width, s.width)
    rows = ops.matmul(x, w)

    def heads(i: int) -> Tensor:
        part = ops.slice(rows, [0, 0, i * s.width], [s.batch, s.length, (i + 1) * s.width])
        return ops.permute(ops.reshape(part, [s.batch, s.length, s.heads, s.head]), [0, 2, 1, 3])

    mixed, *_ = ops.sdpfa_fwd(*map(heads, range(3)), is_causal=True)
    merged = ops.reshape(ops.permute(mixed, [0, 2, 1, 3]), [s.batch, s.length, s.width])
    outputs(fd, ops.matmul(merged, out))
    split(fd, TP8, (x, [None, None, None]), (w, [None, "tp"]), (out, ["tp", None]))


@known(27.3, 16.78)
def layers_in_blocks_of_two_axes(fd: Fd, s: Sizes) -> None:
    """Of two axes, one of 4 is 2 by 2: each second product's rows and weights come among two, and its sums go back."""
    x, *weights = floats(fd, s.tokens, s.width), *(floats(fd, s.width, s.width) for _ in range(4))
    y = x
    for weight in weights:
        y = fd.ops.relu(fd.ops.matmul(y, weight))
    outputs(fd, y)
    split(fd, DP2_TP4, *((t, ["dp", "tp"]) for t in (x, *weights, y)))


@known(33.55, 29.36)
def a_product_in_three_dims(fd: Fd, s: Sizes) -> None:
    """Blocks of [4096, 4096] on 2 by 4: the dim that is summed lies over two ranks, too."""
    a, b = (floats(fd, s.tokens, s.tokens) for _ in range(2))
    c = fd.ops.matmul(a, b)
    outputs(fd, c)
    split(fd, DP2_TP4, *((t, ["dp", "tp"]) for t in (a, b, c)))


@known(16.78, 12.58)
def attention_with_weights_over_both_axes_backward(fd: Fd, s: Sizes) -> None:
    """Stored in blocks of rows (FSDP) and heads; the heads go over two of the four ranks."""
    x, *weights = floats(fd, s.batch, s.length, s.width), *(floats(fd, s.width, s.width) for _ in range(4))

    def heads(rows: Tensor) -> Tensor:
        return fd.ops.permute(fd.ops.reshape(rows, [s.batch, s.length, s.heads, s.head]), [0, 2, 1, 3])

    mixed = by_hand(fd, *(heads(fd.ops.matmul(x, w)) for w in weights[:3]))
    merged = fd.ops.reshape(fd.ops.permute(mixed, [0, 2, 1, 3]), [s.batch, s.length, s.width])
    made = gradients(fd, fd.ops.matmul(merged, weights[3]), weights)
    columns = [(t, ["dp", "tp"]) for t in (*weights[:3], *made[:3])]
    split(fd, DP2_TP4, (x, ["dp", None, None]), *columns, *((t, ["tp", "dp"]) for t in (weights[3], made[3])))


@known(88.14, 21.0)
def a_loss_whose_rows_and_words_lie_over_one_axis(fd: Fd, s: Sizes) -> None:
    """Rows in two groups, words over four ranks: AG of rows and RS of their gradient among four, 6.29 each, AG of the
    head and RS of its gradient among two, 4.19 each.
    """
    index, rows, heads = loss_of_a_head(fd, s, 2 * s.hidden)
    split(fd, TP8, (index, ["tp", None]), *((t, ["tp", None, None]) for t in rows))
    split(fd, TP8, *((t, ["tp", None]) for t in heads))


@known(58.72, 46.16)
def a_loss_whose_rows_lie_over_one_axis(fd: Fd, s: Sizes) -> None:
    """The head is whole: AG and RS of rows among four; its gradient is scattered among two and gathered among eight."""
    index, rows, heads = loss_of_a_head(fd, s, 2 * s.hidden)
    split(fd, TP8, (index, ["tp", None]), *((t, ["tp", None, None]) for t in rows))
    split(fd, TP8, *((t, [None, None]) for t in heads))
