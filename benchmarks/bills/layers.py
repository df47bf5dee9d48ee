"""The layers that the programs are made of, in ops of `fd.ops`: MLP, attention, pre-LN block, mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import meshfuse as mf

Tensor = mf.TensorView


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the programs are built for; the defaults are those of the published figures."""

    batch: int = 8
    length: int = 512
    width: int = 1024
    hidden: int = 4096
    heads: int = 16
    vocab: int = 32768
    fused_heads: int = 12
    fused_head: int = 128
    experts: int = 16
    capacity: int = 64
    expert_hidden: int = 1024
    rows: int = 256
    best: int = 8

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def head(self) -> int:
        return self.width // self.heads


FULL = Sizes()
# Quick to run, and every split of the full sizes is even in these, too.
SMALL = Sizes(8, 32, 64, 256, 16, 512, 12, 8, 16, 4, 64, 16, 4)


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Attention's q, k, v [D, H, D/H] and o [H, D/H, D]; the MLP's w1 [D, F] and w2 [F, D]; gains and biases [D]."""

    qkv: tuple[Tensor, ...]
    out: Tensor
    w1: Tensor
    w2: Tensor
    norms: tuple[Tensor, ...]

    @property
    def all(self) -> list[Tensor]:
        return [*self.qkv, self.out, self.w1, self.w2, *self.norms]


def floats(fd: mf.FusionDefinition, *shape: int) -> Tensor:
    """An input of float32."""
    return fd.define_tensor(list(shape))


def integers(fd: mf.FusionDefinition, *shape: int) -> Tensor:
    """An input of int64."""
    return fd.define_tensor(list(shape), dtype=mf.DataType.Int)


def attention_weights(fd: mf.FusionDefinition, s: Sizes) -> tuple[tuple[Tensor, ...], Tensor]:
    """The projections to q, k, v [D, H, D/H] and from the heads [H, D/H, D]."""
    qkv = tuple(floats(fd, s.width, s.heads, s.head) for _ in range(3))
    return qkv, floats(fd, s.heads, s.head, s.width)


def block_weights(fd: mf.FusionDefinition, s: Sizes) -> BlockWeights:
    """The inputs of a block, its two gains and biases last."""
    qkv, out = attention_weights(fd, s)
    w1, w2 = floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)
    return BlockWeights(qkv, out, w1, w2, tuple(floats(fd, s.width) for _ in range(4)))


def mlp(fd: mf.FusionDefinition, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """gelu(x·w1)·w2"""
    return fd.ops.matmul(fd.ops.gelu(fd.ops.matmul(x, w1)), w2)


def attention(fd: mf.FusionDefinition, s: Sizes, x: Tensor, qkv: Sequence[Tensor], out: Tensor) -> Tensor:
    """Causal softmax attention of x [B, S, D]."""
    ops, batch, length = fd.ops, x.type.shape[0], x.type.shape[1]

    def heads(w: Tensor) -> Tensor:
        rows = ops.matmul(x, ops.reshape(w, [s.width, s.width]))
        return ops.permute(ops.reshape(rows, [batch, length, s.heads, s.head]), [0, 2, 1, 3])

    query, key, value = map(heads, qkv)
    mixed, *_ = ops.sdpfa_fwd(query, key, value, is_causal=True)
    merged = ops.reshape(ops.permute(mixed, [0, 2, 1, 3]), [batch, length, s.width])
    return ops.matmul(merged, ops.reshape(out, [s.width, s.width]))


def block(fd: mf.FusionDefinition, s: Sizes, x: Tensor, w: BlockWeights) -> tuple[Tensor, Tensor]:
    """Pre-LN attention and MLP with residuals; both residual sums, the block's result last."""
    gain1, bias1, gain2, bias2 = w.norms
    normed = fd.ops.layer_norm(x, [s.width], gain1, bias1)
    middle = x + attention(fd, s, normed, w.qkv, w.out)
    normed = fd.ops.layer_norm(middle, [s.width], gain2, bias2)
    return middle, middle + mlp(fd, normed, w.w1, w.w2)


def one_hot(fd: mf.FusionDefinition, index: Tensor, classes: int) -> Tensor:
    """[..] indices to [.., classes] of 0 and 1 in float32, zeros where the index is out of range."""
    place = fd.ops.broadcast(fd.ops.iota(classes), [True] * index.ndim + [False])
    found = fd.ops.eq(fd.ops.broadcast(index, [False] * index.ndim + [True]), place)
    return fd.ops.cast(found, mf.DataType.Float)


def top1_routing(fd: mf.FusionDefinition, s: Sizes, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Dispatch and combine of x [G, S, D], both [G, S, E, C] (the top-1 gating of Switch Transformer, 2021).

    A token goes to its likeliest expert, at the place that the earlier tokens of its group leave; tokens beyond the
    capacity are dropped.
    """
    ops = fd.ops
    probabilities = ops.softmax(ops.matmul(x, router), -1)
    chosen = one_hot(fd, ops.argmax(probabilities, -1), s.experts)
    gate = ops.sum(probabilities * chosen, [-1], keepdim=True)
    place = ops.sum(ops.cumsum(chosen, 1) * chosen, [-1]) - 1.0
    slots = one_hot(fd, ops.cast(place, mf.DataType.Int), s.capacity)
    dispatch = ops.broadcast(chosen, [False, False, False, True]) * ops.broadcast(slots, [False, False, True, False])
    return dispatch, dispatch * ops.broadcast(gate, [False, False, False, True])


def experts(fd: mf.FusionDefinition, s: Sizes, x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A mixture of experts on x [G, S, D], w1 [E, D, F], w2 [E, F, D]: one-hot products to the experts and back."""
    ops, slots = fd.ops, s.experts * s.capacity
    groups, length, width = x.type.shape
    dispatch, combine = (ops.reshape(t, [groups, length, slots]) for t in top1_routing(fd, s, x, router))
    sent = ops.matmul(ops.permute(dispatch, [0, 2, 1]), x)
    by_expert = ops.permute(ops.reshape(sent, [groups, s.experts, s.capacity, width]), [1, 0, 2, 3])
    made = mlp(fd, ops.reshape(by_expert, [s.experts, groups * s.capacity, width]), w1, w2)
    by_group = ops.permute(ops.reshape(made, [s.experts, groups, s.capacity, width]), [1, 0, 2, 3])
    return ops.matmul(combine, ops.reshape(by_group, [groups, slots, width]))
