"""Classes of programs whose best plan is several changes away from what ops ask for; figures as in `general`."""

from __future__ import annotations

import dataclasses
import math

from layers import Sizes, Tensor, floats, mlp, one_hot
from programs import TP8, X4_Y2, Fd, gradients, outputs, split

import meshfuse as mf

from .known import Classes, by_hand, loss_of_a_head

CLASSES = Classes()
known = CLASSES.known
D2_S2_T2 = mf.DeviceMesh((2, 2, 2), ("dp", "sp", "tp"))
DP2_FS4 = mf.DeviceMesh((2, 4), ("dp", "fs"))
DP2_EP4 = mf.DeviceMesh((2, 4), ("dp", "ep"))


@known(23.07, 9.44)
def a_product_of_operands_split_crosswise(fd: Fd, s: Sizes) -> None:
    """Rows stay on two axes and columns go to the third: 1 AG of half of x, and w moves by a permute."""
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, s.hidden)
    outputs(fd, fd.ops.matmul(x, w))
    split(fd, D2_S2_T2, (x, [("sp", "dp"), "tp"]), (w, [("tp", "dp"), "sp"]))  # type: ignore[list-item]


@known(23.07, 9.44)
def a_product_summed_over_the_axis_of_both_columns_and_rows(fd: Fd, s: Sizes) -> None:
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, s.hidden)
    outputs(fd, fd.ops.matmul(x, w))
    split(fd, D2_S2_T2, (x, [("dp", "sp"), "tp"]), (w, ["tp", ("dp", "sp")]))  # type: ignore[list-item]


def two_experts_each(fd: Fd, s: Sizes, x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Tokens go to their two likeliest experts, as in GShard (2020); capacity of all."""
    ops, places = fd.ops, 2 * s.capacity
    groups, length, width = x.type.shape
    likely = ops.softmax(ops.matmul(x, router), -1)
    first = one_hot(fd, ops.argmax(likely, -1), s.experts)
    second = one_hot(fd, ops.argmax(likely * (1.0 - first), -1), s.experts)
    combine, taken = None, ops.sum(first, [1], keepdim=True)
    for chosen, before in ((first, 0.0), (second, taken)):
        place = ops.sum((ops.cumsum(chosen, 1) + before) * chosen, [-1]) - 1.0
        slots = one_hot(fd, ops.cast(place, mf.DataType.Int), places)
        gate = chosen * ops.sum(likely * chosen, [-1], keepdim=True)
        part = ops.broadcast(gate, [False, False, False, True]) * ops.broadcast(slots, [False, False, True, False])
        combine = part if combine is None else combine + part
    assert combine is not None
    combine = ops.reshape(combine, [groups, length, s.experts * places])
    sent = ops.matmul(ops.permute(ops.cast(ops.gt(combine, 0.0), mf.DataType.Float), [0, 2, 1]), x)
    by_expert = ops.permute(ops.reshape(sent, [groups, s.experts, places, width]), [1, 0, 2, 3])
    made = mlp(fd, ops.reshape(by_expert, [s.experts, groups * places, width]), w1, w2)
    by_group = ops.permute(ops.reshape(made, [s.experts, groups, places, width]), [1, 0, 2, 3])
    return ops.matmul(combine, ops.reshape(by_group, [groups, s.experts * places, width]))


@known(235.0, 38.92)
def gradients_of_two_experts_for_each_token(fd: Fd, s: Sizes) -> None:
    """3 permutes of experts' rows, and 2 AG over dp of gradients, which no rank needs to reduce: those of dp share each
    expert's hidden dim, not its rows (4 all-to-alls and 2 AR would send 58.7).
    """
    x, router = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, s.experts)
    w1, w2 = floats(fd, s.experts, s.width, s.expert_hidden), floats(fd, s.experts, s.expert_hidden, s.width)
    made = gradients(fd, two_experts_each(fd, s, x, router, w1, w2), [router, w1, w2])
    split(fd, DP2_EP4, (x, [("dp", "ep"), None, None]))  # type: ignore[list-item]
    for w in (w1, w2, *made[1:]):
        split(fd, DP2_EP4, (w, ["ep", None, None]))
    split(fd, DP2_EP4, (made[0], [None, None]))


def layers_whose_axes_change_places(fd: Fd, s: Sizes) -> tuple[Tensor, list[Tensor]]:
    """Two residual MLPs: the axis of the rows is that of the hidden dim in the second, which needs all of its rows."""
    x, weights = floats(fd, s.tokens, s.width), []
    split(fd, X4_Y2, (x, ["x", None]))
    for axis in ("y", "x"):
        w1, w2 = floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
        split(fd, X4_Y2, (w1, [None, axis]), (w2, [axis, None]))
        weights += [w1, w2]
    y = x + mlp(fd, x, *weights[:2])
    return y + mlp(fd, y, *weights[2:]), weights


@known(29.36, 16.78)
def two_layers_whose_axes_change_places(fd: Fd, s: Sizes) -> None:
    """RS over y, AG over x of every second row block, RS over x back to them, AG over y: no rows change their order."""
    y, _ = layers_whose_axes_change_places(fd, s)
    split(fd, X4_Y2, (y, ["x", None]))
    outputs(fd, y)


@known(79.69, 62.92)
def gradients_of_two_layers_whose_axes_change_places(fd: Fd, s: Sizes) -> None:
    """The same again for the gradients of rows, and 4 AR of those of weights."""
    gradients(fd, *layers_whose_axes_change_places(fd, s))


@known(29.36, 17.83)
def gradients_of_fewer_experts_than_either_axis_has_ranks(fd: Fd, s: Sizes) -> None:
    """One expert per rank of dp, whose four ranks share its rows: 3 all-to-alls of rows over dp, 2 AG of weights over
    ep; 2 RS of gradients over ep and 2 AG over dp.
    """
    s = dataclasses.replace(s, experts=2, capacity=2 * s.capacity)
    x, router = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, s.experts)
    w1, w2 = floats(fd, s.experts, s.width, s.expert_hidden), floats(fd, s.experts, s.expert_hidden, s.width)
    gradients(fd, two_experts_each(fd, s, x, router, w1, w2), [w1, w2])
    split(fd, DP2_EP4, (x, [("dp", "ep"), None, None]))  # type: ignore[list-item]
    split(fd, DP2_EP4, (w1, [None, None, "ep"]), (w2, [None, "ep", None]))


@known(29.36, 20.98)
def a_step_of_attention_whose_weights_lie_on_one_of_the_axes_of_the_batch(fd: Fd, s: Sizes) -> None:
    """The ranks of dp share columns, not rows: AG of rows twice and RS once over dp, weights' halves over fs."""
    x = floats(fd, s.batch, s.length, s.width)
    weights = [floats(fd, s.width, s.width) for _ in range(4)]
    shape = [s.batch, s.length, s.heads, s.head]
    q, k, v = (fd.ops.permute(fd.ops.reshape(fd.ops.matmul(x, w), shape), [0, 2, 1, 3]) for w in weights[:3])
    mixed = fd.ops.reshape(fd.ops.permute(by_hand(fd, q, k, v), [0, 2, 1, 3]), [s.batch, s.length, s.width])
    y = fd.ops.matmul(mixed, weights[3])
    made = fd.grad(fd.ops.sum(y * y) * 0.5, weights)
    stepped = [w - g * 1e-3 for w, g in zip(weights, made, strict=True)]
    outputs(fd, *stepped)
    split(fd, DP2_FS4, (x, [("dp", "fs"), None, None]))  # type: ignore[list-item]
    split(fd, DP2_FS4, *((w, ["fs", None]) for w in (*weights, *stepped)))


@known(math.inf, 146.9)  # XLA was not asked.
def a_loss_whose_rows_lie_over_both_axes(fd: Fd, s: Sizes) -> None:
    """Of a head that is whole on every rank: all ranks share the vocabulary, not the rows. AG of rows, RS of their
    gradient, and AG of the head's (an AR of it would send 234.9).
    """
    index, rows, heads = loss_of_a_head(fd, s, s.vocab)
    for t in rows:
        split(fd, DP2_FS4, (t, [("dp", "fs"), None, None]))  # type: ignore[list-item]
    split(fd, DP2_FS4, (index, [("dp", "fs"), None]), *((t, [None, None]) for t in heads))  # type: ignore[list-item]


@known(math.inf, 79.82)
def a_loss_whose_rows_lie_over_an_axis_that_its_head_does_not(fd: Fd, s: Sizes) -> None:
    """The vocabulary over all axes again: AG of the head's gradient over two, in place of an AR."""
    index, rows, heads = loss_of_a_head(fd, s, s.vocab)
    split(fd, D2_S2_T2, *((t, ["dp", "sp", None]) for t in rows), *((t, ["tp", None]) for t in heads))
    split(fd, D2_S2_T2, (index, ["dp", "sp"]))


@known(math.inf, 205.7)
def a_language_model_whose_weights_are_whole(fd: Fd, s: Sizes) -> None:
    """As above, after a residual MLP (AR of all gradients would send 293.6; a plan by hand, of about 196,
    has not been found)."""
    tokens, index = (fd.define_tensor([s.batch, s.length], dtype=mf.DataType.Int) for _ in range(2))
    table, head = (floats(fd, s.vocab, s.width) for _ in range(2))
    w1, w2 = floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
    x = fd.ops.embedding_fwd(tokens, table)
    loss = fd.ops.cross_entropy(fd.ops.linear(x + mlp(fd, x, w1, w2), head), index)
    outputs(fd, loss, *fd.grad(loss, [head, w1, w2]))
    for t in (tokens, index):
        split(fd, DP2_FS4, (t, [("dp", "fs"), None]))  # type: ignore[list-item]


@known(math.inf, 5.521)
def gradients_of_a_contrastive_loss(fd: Fd, s: Sizes) -> None:
    """Of pairs of samples over all ranks, as in CLIP (2021): AG of one side's embeddings, RS of their gradient and of
    those of both weights; or as much by AG of both inputs, of which one comes for the forward already.
    """
    x, y = (floats(fd, s.length, s.width) for _ in range(2))
    weights = [floats(fd, s.width, s.width // 2) for _ in range(2)]
    split(fd, TP8, *((t, ["tp", None]) for t in (x, y)), *((w, [None, None]) for w in weights))
    a, b = (fd.ops.matmul(t, w) for t, w in zip((x, y), weights, strict=True))
    scores, loss = fd.ops.matmul(a, fd.ops.permute(b, [1, 0])), -2 * fd.ops.sum(a * b)
    for dim in (0, 1):
        most = fd.ops.max(scores, [dim], keepdim=True)
        loss = loss + fd.ops.sum(fd.ops.log(fd.ops.sum(fd.ops.exp(scores - most), [dim], keepdim=True)) + most)
    outputs(fd, loss, *fd.grad(loss, weights))
