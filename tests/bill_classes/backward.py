"""Classes of backward programs in which weights alone are split; figures as in `general`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import layers
from layers import Sizes, Tensor, floats
from programs import TP8, Fd, gradients, outputs, split

import meshfuse as mf

from .known import Classes, by_hand

CLASSES = Classes()
known = CLASSES.known


def projected(fd: Fd, s: Sizes, rows: Tensor, heads: int) -> Tensor:
    """[B, S, heads * K] as [B, heads, S, K]."""
    batch, length, _ = rows.type.shape
    return fd.ops.permute(fd.ops.reshape(rows, [batch, length, heads, s.head]), [0, 2, 1, 3])


def back(fd: Fd, s: Sizes, mixed: Tensor) -> Tensor:
    batch, length = mixed.type.shape[0], mixed.type.shape[2]
    return fd.ops.reshape(fd.ops.permute(mixed, [0, 2, 1, 3]), [batch, length, s.width])


def trained(fd: Fd, y: Tensor, x: Tensor, columns: Sequence[Tensor], lines: Sequence[Tensor]) -> None:
    """The gradients by x and the weights, laid as they are: weights split by their columns or their lines."""
    made = gradients(fd, y, [x, *columns, *lines])
    split(fd, TP8, (x, [None, None, None]), (made[0], [None, None, None]))
    count = len(columns)
    for weights in (columns, made[1 : count + 1]):
        split(fd, TP8, *((w, [None, "tp"]) for w in weights))
    for weights in (lines, made[count + 1 :]):
        split(fd, TP8, *((w, ["tp", None]) for w in weights))


def attention_and_its_gradients(fd: Fd, s: Sizes, batch: int) -> None:
    x, *qkv, out = floats(fd, batch, s.length, s.width), *(floats(fd, s.width, s.width) for _ in range(4))
    mixed = by_hand(fd, *(projected(fd, s, fd.ops.matmul(x, w), s.heads) for w in qkv))
    trained(fd, fd.ops.matmul(back(fd, s, mixed), out), x, qkv, [out])


@known(117.44, 33.56)
def attention_with_weights_split_backward(fd: Fd, s: Sizes) -> None:
    """Heads over 2 ranks and rows over 4: 4 AG of halves of weights, 4 RS of their gradients, and an RS and an AG of
    rows, over all; AR and AG of x's. All on the batch would send 44.0.
    """
    attention_and_its_gradients(fd, s, s.batch)


@known(469.77, 88.09)
def attention_of_many_rows_with_weights_split_backward(fd: Fd, s: Sizes) -> None:
    """As above: weights are gathered before the first product, though that pays in the backward only."""
    attention_and_its_gradients(fd, s, 4 * s.batch)


def longer(s: Sizes) -> Sizes:
    """Sequences of twice the length, and half of the heads."""
    return dataclasses.replace(s, length=2 * s.length, width=s.width // 2, heads=s.heads // 2)


# XLA was not asked.
@known(math.inf, 13.11)
def attention_of_a_batch_of_four_with_weights_split_backward(fd: Fd, s: Sizes) -> None:
    """As above, though eight ranks do not share four samples: four do (heads over all ranks would send 15.6)."""
    attention_and_its_gradients(fd, longer(s), s.batch // 2)


@known(math.inf, 8.66)
def attention_of_a_batch_of_two_with_weights_split_backward(fd: Fd, s: Sizes) -> None:
    attention_and_its_gradients(fd, longer(s), s.batch // 4)


@known(75.89, 33.04)
def grouped_heads_in_one_product_backward(fd: Fd, s: Sizes) -> None:
    """4 heads of k and of v for those of q, all of one product: on the batch, as above."""
    groups, kept = 4, s.heads // 4
    x, w, out = (
        floats(fd, s.batch, s.length, s.width),
        floats(fd, s.width, s.width * 3 // 2),
        floats(fd, s.width, s.width),
    )
    rows, each = fd.ops.matmul(x, w), s.width // 4
    parts = [(0, s.width), (s.width, s.width + each), (s.width + each, s.width + 2 * each)]
    q, k, v = (fd.ops.slice(rows, [0, 0, a], [s.batch, s.length, z]) for a, z in parts)
    shared = [s.batch, groups, kept, s.length, s.head]
    k, v = (
        fd.ops.reshape(
            fd.ops.expand(fd.ops.broadcast(projected(fd, s, t, groups), [False, False, True, False, False]), shared),
            [s.batch, s.heads, s.length, s.head],
        )
        for t in (k, v)
    )
    mixed = by_hand(fd, projected(fd, s, q, s.heads), k, v)
    trained(fd, fd.ops.matmul(back(fd, s, mixed), out), x, [w], [out])


@known(176.16, 58.73)
def attention_beside_the_mlp_backward(fd: Fd, s: Sizes) -> None:
    """x + attention(x) + mlp(x), as in GPT-J and PaLM: 1 AR of the two products' sum, 1 of x's gradient."""
    x, *qkv, out = floats(fd, s.batch, s.length, s.width), *(floats(fd, s.width, s.width) for _ in range(4))
    w1, w2 = floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
    mixed = by_hand(fd, *(projected(fd, s, fd.ops.matmul(x, w), s.heads) for w in qkv))
    y = x + fd.ops.matmul(back(fd, s, mixed), out) + layers.mlp(fd, x, w1, w2)
    trained(fd, y, x, [*qkv, w1], [out, w2])


@known(92.32, 29.55)
def experts_and_their_gates_backward(fd: Fd, s: Sizes) -> None:
    """Experts over 4, each over 2, gates after the second product: 1 AR of the sum over the experts. The products
    themselves are never reduced: the gates' gradient sums them over the width, too.
    """
    mesh, ops, hidden = mf.DeviceMesh((4, 2), ("ep", "tp")), fd.ops, s.hidden // 2
    x, router = floats(fd, s.tokens, s.width), floats(fd, s.width, 8)
    w1, w2 = floats(fd, 8, s.width, hidden), floats(fd, 8, hidden, s.width)
    gates = ops.permute(ops.softmax(ops.matmul(x, router), -1), [1, 0])
    made = ops.matmul(ops.gelu(ops.matmul(ops.broadcast(x, [True, False, False]), w1)), w2)
    weights = [router, w1, w2]
    found = gradients(fd, ops.sum(made * ops.broadcast(gates, [False, False, True]), [0]), weights)
    split(fd, mesh, *((t, ["ep", None, "tp"]) for t in (w1, found[1])))
    split(fd, mesh, *((t, ["ep", "tp", None]) for t in (w2, found[2])))
    split(fd, mesh, (found[0], [None, None]))


@known(16.78, 14.69)
def clipped_gradients_of_an_mlp_on_two_axes(fd: Fd, s: Sizes) -> None:
    """Rows over 2, the hidden over 4: 1 AR of y, and gradients stay where their RS brings them, norms and all."""
    mesh, ops = mf.DeviceMesh((2, 4), ("dp", "tp")), fd.ops
    x = floats(fd, s.batch, s.length, s.width)
    w1, w2 = floats(fd, s.width, s.hidden // 2), floats(fd, s.hidden // 2, s.width)
    y = layers.mlp(fd, x, w1, w2)
    grads = fd.grad(ops.sum(y * y, [0, 1, 2]), [w1, w2])
    square = ops.sum(grads[0] * grads[0], [0, 1]) + ops.sum(grads[1] * grads[1], [0, 1])
    outputs(fd, *(g * ops.rsqrt(square + 1e-6) for g in grads))
    split(fd, mesh, (x, ["dp", None, None]), (w1, [None, "tp"]), (w2, ["tp", None]))
