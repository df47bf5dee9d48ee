"""Classes of programs beyond the table of bills: each is held to the best of XLA's bytes and of a plan by hand.

`xla` is MB per rank as in the table: jax 0.10.2, the better of Shardy and GSPMD on 8 host devices, float32, indices of
32 bits (ours have 64). `hand` is the best plan that is known, with what it does.
"""

from __future__ import annotations

import layers
import programs
from layers import Sizes, Tensor, floats, integers
from programs import DP2_TP4, DP8, TP8, X4_Y2, Fd, gradients, megatron_mlp, on_dim0, outputs, split

import meshfuse as mf

from .known import Classes, by_hand

CLASSES = Classes()
known = CLASSES.known
SP8 = mf.DeviceMesh((8,), ("sp",))
DP2_FS4 = mf.DeviceMesh((2, 4), ("dp", "fs"))
DP2_EP4 = mf.DeviceMesh((2, 4), ("dp", "ep"))


# attention and sequences ------------------------------------------------------------------------------------------


def heads(fd: Fd, s: Sizes) -> list[Tensor]:
    qkv = [floats(fd, s.batch, s.heads, s.length, s.head) for _ in range(3)]
    split(fd, SP8, *((t, [None, None, "sp", None]) for t in qkv))
    return qkv


@known(29.36, 5.51)
def attention_by_hand_over_a_split_sequence(fd: Fd, s: Sizes) -> None:
    """q, k and v to the heads (or the batch) by an all-to-all each."""
    outputs(fd, by_hand(fd, *heads(fd, s)))


@known(88.08, 12.85)
def its_gradients(fd: Fd, s: Sizes) -> None:
    """No more than twice that and one all-to-all per gradient; they are free to stay by heads."""
    qkv = heads(fd, s)
    gradients(fd, by_hand(fd, *qkv), qkv)


@known(88.08, 73.41)
def sequence_parallel_mlp_backward(fd: Fd, s: Sizes) -> None:
    """Forward AG and RS; backward AG of the result's gradient, AG of x again, RS of x's."""
    x, w1, w2 = programs.mlp_inputs(fd, s)
    y = layers.mlp(fd, x, w1, w2)
    made = gradients(fd, y, [x, w1, w2])
    split(fd, TP8, (x, [None, "tp", None]), (y, [None, "tp", None]), (made[0], [None, "tp", None]))
    megatron_mlp(fd, TP8, w1, w2)


def weights_of_a_layer(fd: Fd, s: Sizes) -> list[Tensor]:
    """q, k, v and o [D, D], w1, w2: whole on every rank."""
    square = [floats(fd, s.width, s.width) for _ in range(4)]
    return [*square, floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)]


def layer(fd: Fd, s: Sizes, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Attention in products and an MLP, with residuals."""
    *qkv, out, w1, w2 = weights
    shape = [x.type.shape[0], x.type.shape[1], s.heads, s.head]
    rows = [fd.ops.permute(fd.ops.reshape(fd.ops.matmul(x, w), shape), [0, 2, 1, 3]) for w in qkv]
    mixed = fd.ops.reshape(fd.ops.permute(by_hand(fd, *rows), [0, 2, 1, 3]), [*shape[:2], s.width])
    x = x + fd.ops.matmul(mixed, out)
    return x + layers.mlp(fd, x, w1, w2)


@known(58.72, 1.84)
def two_layers_of_a_split_sequence(fd: Fd, s: Sizes) -> None:
    """x to the batch by one all-to-all, before the first product; there is nothing to move after it."""
    x, weights = floats(fd, s.batch, s.length, s.width), [weights_of_a_layer(fd, s) for _ in range(2)]
    outputs(fd, layer(fd, s, layer(fd, s, x, weights[0]), weights[1]))
    split(fd, SP8, (x, [None, "sp", None]))


@known(29.36, 3.67)
def a_layer_from_sequence_to_sequence(fd: Fd, s: Sizes) -> None:
    """x to the batch, and what it gives back."""
    x = floats(fd, s.batch, s.length, s.width)
    y = layer(fd, s, x, weights_of_a_layer(fd, s))
    outputs(fd, y)
    split(fd, SP8, (x, [None, "sp", None]), (y, [None, "sp", None]))


@known(146.81, 88.06)
def its_weights_gradients(fd: Fd, s: Sizes) -> None:
    """x to the batch, and an all-reduce per weight, of the MLP's first over 4 of the ranks."""
    x, weights = floats(fd, s.batch, s.length, s.width), weights_of_a_layer(fd, s)
    gradients(fd, layer(fd, s, x, weights), weights)
    split(fd, SP8, (x, [None, "sp", None]))


@known(4.20, 1.05)
def attention_of_a_batch_and_sequence_both_split(fd: Fd, s: Sizes) -> None:
    """The sequence's axis goes to the batch, inside the axis that is there."""
    x = floats(fd, s.batch, s.length, s.width)
    outputs(fd, layer(fd, s, x, weights_of_a_layer(fd, s)))
    split(fd, X4_Y2, (x, ["x", "y", None]))


@known(30.28, 3.68)
def attention_to_a_split_memory(fd: Fd, s: Sizes) -> None:
    """The memory goes to the batch once; its keys and values are made there."""
    x, memory = floats(fd, s.batch, s.length, s.width), floats(fd, s.batch, 2 * s.length, s.width)
    weights = [floats(fd, s.width, s.width) for _ in range(4)]

    def rows(t: Tensor, w: Tensor) -> Tensor:
        shape = [s.batch, t.type.shape[1], s.heads, s.head]
        return fd.ops.permute(fd.ops.reshape(fd.ops.matmul(t, w), shape), [0, 2, 1, 3])

    q, k, v = rows(x, weights[0]), rows(memory, weights[1]), rows(memory, weights[2])
    mixed = fd.ops.matmul(fd.ops.softmax(fd.ops.matmul(q, fd.ops.permute(k, [0, 1, 3, 2])) * 0.125, -1), v)
    merged = fd.ops.reshape(fd.ops.permute(mixed, [0, 2, 1, 3]), [s.batch, s.length, s.width])
    outputs(fd, fd.ops.matmul(merged, weights[3]))
    split(fd, SP8, (memory, [None, "sp", None]))


@known(14.68, 1.84)
def tokens_mixed_along_a_split_sequence(fd: Fd, s: Sizes) -> None:
    """An MLP over the sequence, then one over the width: x goes to the batch."""
    x, ops = floats(fd, s.batch, s.length, s.width), fd.ops
    w1, w2, w3, w4 = (floats(fd, n, n) for n in (s.length, s.length, s.width, s.width))
    y = x + ops.permute(layers.mlp(fd, ops.permute(x, [0, 2, 1]), w1, w2), [0, 2, 1])
    outputs(fd, y + layers.mlp(fd, y, w3, w4))
    split(fd, SP8, (x, [None, "sp", None]))


@known(29.36, 3.67)
def running_states_of_chunks_along_a_split_sequence(fd: Fd, s: Sizes) -> None:
    """Causal linear attention: chunks stay, and the blocks' totals of the states go to and fro; q, k, v do not move."""
    ops, chunk = fd.ops, s.length // 16
    qkv = [floats(fd, s.batch, s.heads, s.length, s.head) for _ in range(3)]
    q, k, v = (ops.reshape(t, [s.batch, s.heads, 16, chunk, s.head]) for t in qkv)
    after = ops.permute(k, [0, 1, 2, 4, 3])
    states = ops.matmul(after, v)
    before = ops.cumsum(states, 2) - states
    outputs(fd, ops.matmul(q, before) + ops.matmul(ops.matmul(q, after), v))
    split(fd, SP8, *((t, [None, None, "sp", None]) for t in qkv))


# products whose operands disagree ---------------------------------------------------------------------------------


@known(8.39, 8.39)
def product_of_operands_split_over_both_axes(fd: Fd, s: Sizes) -> None:
    """w gathered over x, x over y; nothing is reduced."""
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, s.hidden)
    outputs(fd, fd.ops.matmul(x, w))
    split(fd, X4_Y2, (x, ["x", "y"]), (w, ["x", "y"]))


@known(16.78, 16.78)
def mlp_on_two_axes(fd: Fd, s: Sizes) -> None:
    x, w1, w2 = programs.mlp_inputs(fd, s)
    y = layers.mlp(fd, x, w1, w2)
    outputs(fd, y)
    split(fd, X4_Y2, (x, ["x", None, "y"]), (y, ["x", None, "y"]), (w1, ["x", "y"]), (w2, ["y", "x"]))


@known(234.88, 3.67)
def scores_of_split_embeddings(fd: Fd, s: Sizes) -> None:
    """Both operands to the heads: sums over the embedding would be far larger than they are."""
    q, k = (floats(fd, s.batch, s.heads, s.length, s.head) for _ in range(2))
    outputs(fd, fd.ops.softmax(fd.ops.matmul(q, fd.ops.permute(k, [0, 1, 3, 2])), -1))
    split(fd, TP8, (q, [None, None, None, "tp"]), (k, [None, None, None, "tp"]))


@known(29.36, 29.36)
def sums_of_products_meet(fd: Fd, s: Sizes) -> None:
    """x w + (x a) b with rows of w and a split: one AR, and that of x a is deferred into it."""
    x, w = floats(fd, s.batch, s.length, s.hidden), floats(fd, s.hidden, s.width)
    a, b = floats(fd, s.hidden, 16), floats(fd, 16, s.width)
    ops = fd.ops
    outputs(fd, ops.matmul(x, w) + ops.matmul(ops.matmul(x, a), b) * 2.0)
    split(fd, TP8, (x, [None, None, "tp"]), (w, ["tp", None]), (a, ["tp", None]))


# vocabularies -----------------------------------------------------------------------------------------------------


def language_model(fd: Fd, s: Sizes) -> tuple[list[Tensor], Tensor]:
    """Embedding, one MLP with its residual, the same table as head, and the loss: (table, w1, w2), loss."""
    tokens, targets = integers(fd, s.batch, s.length), integers(fd, s.batch, s.length)
    table, w1, w2 = floats(fd, s.vocab, s.width), floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
    x = fd.ops.embedding_fwd(tokens, table)
    x = x + layers.mlp(fd, x, w1, w2)
    logits = fd.ops.matmul(x, fd.ops.permute(table, [1, 0]))
    return [tokens, targets, table, w1, w2], fd.ops.cross_entropy(logits, targets)


@known(968.88, 58.81)
def tied_table_split_by_width(fd: Fd, s: Sizes) -> None:
    """AG of what is looked up, AR of the MLP, the table by all-to-all to vocabulary, and 3 AR of [T]."""
    (_, _, table, w1, w2), loss = language_model(fd, s)
    outputs(fd, loss)
    split(fd, TP8, (table, [None, "tp"]))
    megatron_mlp(fd, TP8, w1, w2)


@known(117.53, 117.53)
def tied_table_split_by_vocabulary_backward(fd: Fd, s: Sizes) -> None:
    """2 AR forward, 2 backward, and those of [T]."""
    (_, _, table, w1, w2), loss = language_model(fd, s)
    outputs(fd, *fd.grad(loss, [table, w1, w2]))
    split(fd, TP8, (table, ["tp", None]))
    megatron_mlp(fd, TP8, w1, w2)


@known(297.29, 297.29)
def language_model_with_split_storage(fd: Fd, s: Sizes) -> None:
    """FSDP over columns: everything gathered once, every gradient scattered once, or less."""
    (tokens, targets, *weights), loss = language_model(fd, s)
    made = fd.grad(loss, weights)
    outputs(fd, *made)
    on_dim0(fd, DP8, "dp", tokens, targets)
    split(fd, DP8, *((t, [None, "dp"]) for t in (*weights, *made)))


@known(14.69, 14.71)
def rows_of_a_split_table_by_split_indices(fd: Fd, s: Sizes) -> None:
    """Four vocabularies: the table is too large to move. The indices are gathered (64 bits), the sums scattered."""
    table, index = floats(fd, 4 * s.vocab, s.width), integers(fd, s.tokens)
    outputs(fd, fd.ops.index_select(table, index, 0))
    on_dim0(fd, TP8, "tp", table, index)


# parts of split dims ----------------------------------------------------------------------------------------------


@known(4.72, 2.10)
def gated_unit_of_a_split_activation(fd: Fd, s: Sizes) -> None:
    """a · sigmoid(b) of x = [a, b]: ranks that hold the same part of the halves exchange half a shard each."""
    x = floats(fd, s.tokens, 2 * s.width)
    a, b = (fd.ops.slice(x, [0, i * s.width], [s.tokens, (i + 1) * s.width]) for i in range(2))
    outputs(fd, a * fd.ops.sigmoid(b))
    split(fd, TP8, (x, [None, "tp"]))


@known(6.03, 2.10)
def rotated_halves_of_a_split_dim(fd: Fd, s: Sizes) -> None:
    """x c + [-b, a] s, as rotary embeddings have it."""
    x, c, t = floats(fd, s.tokens, s.width), floats(fd, s.width), floats(fd, s.width)
    half = s.width // 2
    a, b = (fd.ops.slice(x, [0, i * half], [s.tokens, (i + 1) * half]) for i in range(2))
    outputs(fd, x * c + fd.ops.cat([fd.ops.neg(b), a], 1) * t)
    split(fd, TP8, (x, [None, "tp"]))


@known(35.78, 30.41)
def fused_projection_of_few_key_heads(fd: Fd, s: Sizes) -> None:
    """Grouped-query attention with heads / 4 heads of keys and values in one weight: 1 AR, and the weight re-laid."""
    ops, kept, few = fd.ops, s.heads * s.head, s.heads // 4 * s.head
    x, w = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, kept + 2 * few)
    out = floats(fd, kept, s.width)
    rows, bounds = ops.matmul(x, w), [0, kept, kept + few, kept + 2 * few]

    def by_head(start: int, stop: int) -> Tensor:
        part = ops.slice(rows, [0, 0, start], [s.batch, s.length, stop])
        return ops.permute(ops.reshape(part, [s.batch, s.length, (stop - start) // s.head, s.head]), [0, 2, 1, 3])

    mixed, *_ = ops.sdpfa_fwd(*map(by_head, bounds[:-1], bounds[1:]), is_causal=True)
    merged = ops.reshape(ops.permute(mixed, [0, 2, 1, 3]), [s.batch, s.length, kept])
    outputs(fd, ops.matmul(merged, out))
    split(fd, TP8, (w, [None, "tp"]), (out, ["tp", None]))


# data parallel, stored in parts, experts --------------------------------------------------------------------------


@known(117.44, 58.73)
def gradients_of_two_halves_of_a_batch(fd: Fd, s: Sizes) -> None:
    """Unreduced sums are added before they are reduced."""
    x, w1, w2 = programs.mlp_inputs(fd, s)
    half = s.length // 2
    parts = [fd.ops.slice(x, [0, i * half, 0], [s.batch, (i + 1) * half, s.width]) for i in range(2)]
    gradients(fd, layers.mlp(fd, parts[0], w1, w2) + layers.mlp(fd, parts[1], w1, w2), [w1, w2])
    on_dim0(fd, DP8, "dp", x)


@known(58.72, 58.73)
def storage_split_inside_replicas(fd: Fd, s: Sizes) -> None:
    """HSDP: AG and RS over 4, AR of the quarters over 2."""
    x, w1, w2 = programs.mlp_inputs(fd, s)
    made = gradients(fd, layers.mlp(fd, x, w1, w2), [w1, w2])
    split(fd, DP2_FS4, (x, [("dp", "fs"), None, None]))  # type: ignore[list-item]
    on_dim0(fd, DP2_FS4, "fs", w1, w2, *made)


@known(58.72, 29.37)
def weights_cast_before_they_are_gathered(fd: Fd, s: Sizes) -> None:
    """FSDP with float32 weights and bfloat16 activations: everything moves in 16 bits."""
    half = mf.DataType.BFloat16
    x = fd.define_tensor([s.batch, s.length, s.width], dtype=half)
    w1, w2 = floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
    y = layers.mlp(fd, x, fd.ops.cast(w1, half), fd.ops.cast(w2, half))
    made = gradients(fd, fd.ops.cast(y, mf.DataType.Float), [w1, w2])
    on_dim0(fd, DP8, "dp", x, w1, w2, *made)


@known(20.97, 20.97)
def data_and_tensor_parallel_step(fd: Fd, s: Sizes) -> None:
    """w - lr · gradient, laid as w: AR over tp of the activation, over dp of the gradients' parts."""
    x, w1, w2 = programs.mlp_inputs(fd, s)
    y = layers.mlp(fd, x, w1, w2)
    made = fd.grad(fd.ops.sum(y * y) * 0.5, [w1, w2])
    new = [w - g * 1e-3 for w, g in zip((w1, w2), made, strict=True)]
    outputs(fd, *new)
    on_dim0(fd, DP2_TP4, "dp", x)
    megatron_mlp(fd, DP2_TP4, w1, w2)
    megatron_mlp(fd, DP2_TP4, *new)


@known(6.29, 6.30)
def experts_beside_data(fd: Fd, s: Sizes) -> None:
    """Tokens over both axes, experts over one: 2 all-to-all over 4 ranks."""
    x, router = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, s.experts)
    w1, w2 = floats(fd, s.experts, s.width, s.expert_hidden), floats(fd, s.experts, s.expert_hidden, s.width)
    outputs(fd, layers.experts(fd, s, x, router, w1, w2))
    split(fd, DP2_EP4, (x, [("dp", "ep"), None, None]))  # type: ignore[list-item]
    on_dim0(fd, DP2_EP4, "ep", w1, w2)


@known(14.71, 2.104)
def rows_over_both_axes_and_a_vocabulary_over_one_of_them(fd: Fd, s: Sizes) -> None:
    """x comes together over the axis that the vocabulary has, stays apart over the other; the sums are of rows only."""
    x, w = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, s.vocab)
    outputs(fd, fd.ops.logsumexp(fd.ops.matmul(x, w), -1))
    split(fd, DP2_TP4, (x, [("dp", "tp"), None, None]), (w, [None, "dp"]))  # type: ignore[list-item]


@known(27.26, 19.40)
def weights_stored_otherwise_than_they_are_used(fd: Fd, s: Sizes) -> None:
    """Stored over tp, used over dp: half of each is gathered, rows come together over dp, 1 RS of the result."""
    x, w1, w2 = programs.mlp_inputs(fd, s)
    outputs(fd, layers.mlp(fd, x, w1, w2))
    both = ("dp", "tp")
    split(fd, DP2_TP4, (x, [None, both, None]), (w1, ["tp", None]), (w2, [None, both]))  # type: ignore[list-item]


def written(fd: Fd, rows: Tensor, new: Tensor, at: int) -> Tensor:
    """Rows [B, S, ..] with others from `at` on."""
    shape, stop = list(rows.type.shape), at + new.type.shape[1]
    zeros = [0] * (len(shape) - 2)
    before = fd.ops.slice(rows, [0, 0, *zeros], [shape[0], at, *shape[2:]])
    return fd.ops.cat([before, new, fd.ops.slice(rows, [0, stop, *zeros], shape)], 1)


@known(13.79, 0.0592)
def a_step_that_writes_to_caches_split_along_the_sequence(fd: Fd, s: Sizes) -> None:
    """Tokens are written where they belong; the softmax takes an AR of its maxima, of its sums, and of the result."""
    size = [s.batch, s.length, s.heads, s.head]
    caches, (q, k, v) = [floats(fd, *size) for _ in range(2)], (floats(fd, size[0], 1, *size[2:]) for _ in range(3))
    keys, values = (written(fd, cache, new, s.length // 5) for cache, new in zip(caches, (k, v), strict=True))
    q, after, among = (fd.ops.permute(t, [0, 2, 1, 3]) for t in (q, keys, values))
    scores = fd.ops.softmax(fd.ops.matmul(q, fd.ops.permute(after, [0, 1, 3, 2])) * 0.125, -1)
    mixed = fd.ops.matmul(scores, among)
    outputs(fd, mixed, keys, values)
    split(fd, SP8, *((t, [None, "sp", None, None]) for t in (*caches, keys, values)), (mixed, [None] * 4))


@known(29.36, 0.0574)
def a_mean_over_tokens_that_a_mask_picks(fd: Fd, s: Sizes) -> None:
    """The sums over ranks are masked and added up over tokens first: AR of a row for each sequence."""
    h, w = floats(fd, s.batch, s.length, s.hidden), floats(fd, s.hidden, s.width)
    mask = floats(fd, s.batch, s.length, 1)
    masked = fd.ops.where(fd.ops.gt(mask, 0.0), fd.ops.matmul(h, w), 0.0)
    pooled = fd.ops.sum(masked, [1])
    outputs(fd, pooled)
    split(fd, TP8, (h, [None, None, "tp"]), (w, ["tp", None]), (mask, [None, None, None]), (pooled, [None, None]))
