"""The 31 programs of the table of bills, each a definition with the annotations of the table and no others.

Outputs are free where the table does not say otherwise. "fwd+bwd" gives the gradients of ½·Σy² by all arguments, "dw"
those by the weights; the value itself is not an output, as in the figures that these are compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layers import (
    FULL,
    SMALL,
    BlockWeights,
    Sizes,
    Tensor,
    attention,
    attention_weights,
    block,
    block_weights,
    experts,
    floats,
    integers,
    mlp,
)

import meshfuse as mf

TP8 = mf.DeviceMesh((8,), ("tp",))
DP8 = mf.DeviceMesh((8,), ("dp",))
EP8 = mf.DeviceMesh((8,), ("ep",))
DP2_TP4 = mf.DeviceMesh((2, 4), ("dp", "tp"))
X4_Y2 = mf.DeviceMesh((4, 2), ("x", "y"))

Fd = mf.FusionDefinition
Spec = Sequence[str | None]
Builder = Callable[[Fd, Sizes], None]


@dataclass(frozen=True, slots=True)
class Program:
    """A program of the table: fills a definition for some sizes."""

    id: str
    build: Builder

    def define(self, sizes: Sizes = FULL) -> Fd:
        """The definition, outputs and annotations included."""
        with mf.FusionDefinition() as fd:
            self.build(fd, sizes)
        return fd


PROGRAMS: dict[str, Program] = {}


def program(name: str) -> Callable[[Builder], Builder]:
    """Register a builder under its id in the table."""

    def register(build: Builder) -> Builder:
        PROGRAMS[name] = Program(name, build)
        return build

    return register


def split(fd: Fd, mesh: mf.DeviceMesh, *pairs: tuple[Tensor, Spec]) -> None:
    """Annotate tensors, one axis name or None per dim."""
    for tensor, spec in pairs:
        fd.mesh_split(tensor, mesh, list(spec))


def on_dim0(fd: Fd, mesh: mf.DeviceMesh, axis: str | None, *tensors: Tensor) -> None:
    """Annotate tensors with an axis on dim 0 (None: not split at all)."""
    split(fd, mesh, *((t, [axis] + [None] * (t.ndim - 1)) for t in tensors))


def outputs(fd: Fd, *tensors: Tensor) -> None:
    for tensor in tensors:
        fd.add_output(tensor)


def gradients(fd: Fd, y: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
    """Output the gradients of ½·Σy² by some tensors."""
    made = fd.grad(fd.ops.sum(y * y) * 0.5, list(wrt))
    outputs(fd, *made)
    return made


def replicated(fd: Fd, mesh: mf.DeviceMesh, *tensors: Tensor) -> None:
    on_dim0(fd, mesh, None, *tensors)


# MLP, attention and block ---------------------------------------------------------------------------------------


def mlp_inputs(fd: Fd, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    return floats(fd, s.batch, s.length, s.width), floats(fd, s.width, s.hidden), floats(fd, s.hidden, s.width)


def megatron_mlp(fd: Fd, mesh: mf.DeviceMesh, w1: Tensor, w2: Tensor) -> None:
    """w1 by columns, w2 by rows."""
    split(fd, mesh, (w1, [None, "tp"]), (w2, ["tp", None]))


def megatron_attention(fd: Fd, mesh: mf.DeviceMesh, qkv: Sequence[Tensor], out: Tensor) -> None:
    """By heads."""
    split(fd, mesh, *((w, [None, "tp", None]) for w in qkv), (out, ["tp", None, None]))


def megatron_block(fd: Fd, mesh: mf.DeviceMesh, w: BlockWeights) -> None:
    """Attention by heads, MLP by its hidden dim, gains and biases replicated."""
    megatron_attention(fd, mesh, w.qkv, w.out)
    megatron_mlp(fd, mesh, w.w1, w.w2)
    replicated(fd, mesh, *w.norms)


@program("a1")
def mlp_forward(fd: Fd, s: Sizes) -> None:
    x, w1, w2 = mlp_inputs(fd, s)
    outputs(fd, mlp(fd, x, w1, w2))
    replicated(fd, TP8, x)
    megatron_mlp(fd, TP8, w1, w2)


@program("b")
def mlp_backward(fd: Fd, s: Sizes) -> None:
    x, w1, w2 = mlp_inputs(fd, s)
    gradients(fd, mlp(fd, x, w1, w2), [x, w1, w2])
    replicated(fd, TP8, x)
    megatron_mlp(fd, TP8, w1, w2)


@program("c2")
def attention_backward(fd: Fd, s: Sizes) -> None:
    x, (qkv, out) = floats(fd, s.batch, s.length, s.width), attention_weights(fd, s)
    gradients(fd, attention(fd, s, x, qkv, out), [x, *qkv, out])
    replicated(fd, TP8, x)
    megatron_attention(fd, TP8, qkv, out)


@program("d2")
def block_backward(fd: Fd, s: Sizes) -> None:
    x, w = floats(fd, s.batch, s.length, s.width), block_weights(fd, s)
    gradients(fd, block(fd, s, x, w)[1], [x, *w.all])
    replicated(fd, TP8, x)
    megatron_block(fd, TP8, w)


def sequence_parallel(fd: Fd, s: Sizes) -> tuple[Tensor, BlockWeights, Tensor]:
    """A block whose residual stream is split along the sequence: x, its weights, and its result."""
    x, w = floats(fd, s.batch, s.length, s.width), block_weights(fd, s)
    middle, y = block(fd, s, x, w)
    split(fd, TP8, *((t, [None, "tp", None]) for t in (x, middle, y)))
    megatron_block(fd, TP8, w)
    return x, w, y


@program("d3")
def sequence_parallel_forward(fd: Fd, s: Sizes) -> None:
    outputs(fd, sequence_parallel(fd, s)[2])


@program("d4")
def sequence_parallel_backward(fd: Fd, s: Sizes) -> None:
    x, w, y = sequence_parallel(fd, s)
    gradients(fd, y, [x, *w.all])


@program("d7")
def short_sequence_parallel_forward(fd: Fd, s: Sizes) -> None:
    sequence_parallel_forward(fd, dataclasses.replace(s, batch=1, length=s.length // 4))


@program("e2")
def fsdp_mlp(fd: Fd, s: Sizes) -> None:
    x, w1, w2 = mlp_inputs(fd, s)
    made = gradients(fd, mlp(fd, x, w1, w2), [w1, w2])
    on_dim0(fd, DP8, "dp", x, w1, w2, *made)


@program("e3")
def fsdp_block(fd: Fd, s: Sizes) -> None:
    x, w = floats(fd, s.batch, s.length, s.width), block_weights(fd, s)
    made = gradients(fd, block(fd, s, x, w)[1], w.all)
    on_dim0(fd, DP8, "dp", x, *w.all, *made)


@program("f1")
def data_and_tensor_parallel_mlp(fd: Fd, s: Sizes) -> None:
    x, w1, w2 = mlp_inputs(fd, s)
    gradients(fd, mlp(fd, x, w1, w2), [w1, w2])
    on_dim0(fd, DP2_TP4, "dp", x)
    megatron_mlp(fd, DP2_TP4, w1, w2)


@program("f2")
def data_and_tensor_parallel_block(fd: Fd, s: Sizes) -> None:
    x, w = floats(fd, s.batch, s.length, s.width), block_weights(fd, s)
    gradients(fd, block(fd, s, x, w)[1], w.all)
    on_dim0(fd, DP2_TP4, "dp", x)
    megatron_block(fd, DP2_TP4, w)


# losses and norms -----------------------------------------------------------------------------------------------


def sharded_loss(fd: Fd, s: Sizes) -> tuple[Tensor, Tensor]:
    """Logits split along the vocabulary, and their mean cross-entropy."""
    logits, targets = floats(fd, s.tokens, s.vocab), integers(fd, s.tokens)
    split(fd, TP8, (logits, [None, "tp"]))
    return logits, fd.ops.cross_entropy(logits, targets)


@program("g1")
def cross_entropy_forward(fd: Fd, s: Sizes) -> None:
    outputs(fd, sharded_loss(fd, s)[1])


@program("g2")
def cross_entropy_backward(fd: Fd, s: Sizes) -> None:
    logits, loss = sharded_loss(fd, s)
    outputs(fd, loss, fd.grad(loss, logits))


@program("h1")
def layer_norm_forward(fd: Fd, s: Sizes) -> None:
    x, gain, bias = floats(fd, s.tokens, s.width), floats(fd, s.width), floats(fd, s.width)
    outputs(fd, fd.ops.layer_norm(x, [s.width], gain, bias))
    split(fd, TP8, (x, [None, "tp"]), (gain, ["tp"]), (bias, ["tp"]))


# mixture of experts ---------------------------------------------------------------------------------------------


def expert_parallel(fd: Fd, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' two weights and the layer's result; the router's weight is whole on every rank."""
    x, router = floats(fd, s.batch, s.length, s.width), floats(fd, s.width, s.experts)
    w1, w2 = floats(fd, s.experts, s.width, s.expert_hidden), floats(fd, s.experts, s.expert_hidden, s.width)
    on_dim0(fd, EP8, "ep", x, w1, w2)
    return w1, w2, experts(fd, s, x, router, w1, w2)


@program("i1")
def experts_forward(fd: Fd, s: Sizes) -> None:
    outputs(fd, expert_parallel(fd, s)[2])


@program("i3")
def experts_backward(fd: Fd, s: Sizes) -> None:
    """By the experts' weights: the table's optimum of three all-to-alls has no reduction of the router's gradient."""
    w1, w2, y = expert_parallel(fd, s)
    gradients(fd, y, [w1, w2])


# products -------------------------------------------------------------------------------------------------------


def product(fd: Fd, s: Sizes, mesh: mf.DeviceMesh, of_x: Spec, of_w: Spec) -> None:
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, s.width)
    outputs(fd, fd.ops.matmul(x, w))
    split(fd, mesh, (x, of_x), (w, of_w))


@program("j2")
def split_contraction(fd: Fd, s: Sizes) -> None:
    product(fd, s, TP8, [None, "tp"], [None, None])


@program("j4")
def crossed_weight(fd: Fd, s: Sizes) -> None:
    product(fd, s, DP2_TP4, ["dp", "tp"], ["tp", "dp"])


@program("m1")
def crossed_weight_on_a_flat_mesh(fd: Fd, s: Sizes) -> None:
    product(fd, s, X4_Y2, ["x", "y"], ["y", "x"])


@program("m2")
def gram_matrix(fd: Fd, s: Sizes) -> None:
    x = floats(fd, s.tokens, s.width)
    outputs(fd, fd.ops.matmul(x, fd.ops.permute(x, [1, 0])))
    split(fd, TP8, (x, ["tp", None]))


@program("m5")
def tied_weight(fd: Fd, s: Sizes) -> None:
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, s.hidden)
    outputs(fd, fd.ops.matmul(fd.ops.relu(fd.ops.matmul(x, w)), fd.ops.permute(w, [1, 0])))
    on_dim0(fd, TP8, "tp", x, w)


@program("l7")
def fused_projection(fd: Fd, s: Sizes) -> None:
    x, w = floats(fd, s.tokens, s.width), floats(fd, s.width, 3 * s.width)
    rows = fd.ops.matmul(x, w)
    bounds = [(i * s.width, (i + 1) * s.width) for i in range(3)]
    q, k, v = (fd.ops.slice(rows, [0, start], [s.tokens, stop]) for start, stop in bounds)
    outputs(fd, q * k + v)
    split(fd, TP8, (x, [None, None]), (w, [None, "tp"]))


# shapes and indexing --------------------------------------------------------------------------------------------


@program("k1")
def merged_dims(fd: Fd, s: Sizes) -> None:
    x = floats(fd, s.batch, s.length, s.width)
    outputs(fd, fd.ops.sin(fd.ops.reshape(x, [s.tokens, s.width])))
    split(fd, TP8, (x, [None, "tp", None]))


@program("k2")
def dim_in_parts(fd: Fd, s: Sizes) -> None:
    x = floats(fd, s.tokens, s.width)
    outputs(fd, fd.ops.sin(fd.ops.reshape(x, [4, s.tokens // 4, s.width])))
    on_dim0(fd, TP8, "tp", x)


@program("k3")
def heads_across_ranks(fd: Fd, s: Sizes) -> None:
    x = floats(fd, s.batch, s.length, s.fused_heads * s.fused_head)
    outputs(fd, fd.ops.sin(fd.ops.reshape(x, [s.batch, s.length, s.fused_heads, s.fused_head])))
    split(fd, TP8, (x, [None, None, "tp"]))


@program("l1")
def concatenation(fd: Fd, s: Sizes) -> None:
    a, b = floats(fd, s.tokens, s.width), floats(fd, s.tokens, s.width)
    outputs(fd, fd.ops.sin(fd.ops.cat([a, b], 1)))
    split(fd, TP8, (a, [None, "tp"]), (b, [None, "tp"]))


@program("l2")
def first_half(fd: Fd, s: Sizes) -> None:
    a = floats(fd, s.tokens, s.width)
    outputs(fd, fd.ops.sin(fd.ops.slice(a, [0, 0], [s.tokens, s.width // 2])))
    split(fd, TP8, (a, [None, "tp"]))


@program("l5")
def roll(fd: Fd, s: Sizes) -> None:
    a, last = floats(fd, s.tokens, s.width), s.width - 1
    parts = fd.ops.slice(a, [0, last], [s.tokens, s.width]), fd.ops.slice(a, [0, 0], [s.tokens, last])
    outputs(fd, fd.ops.cat(list(parts), 1))
    split(fd, TP8, (a, [None, "tp"]))


@program("n2")
def table_lookup(fd: Fd, s: Sizes) -> None:
    table, index = floats(fd, s.vocab, s.width), integers(fd, s.tokens)
    outputs(fd, fd.ops.index_select(table, index, 0))
    split(fd, TP8, (table, [None, "tp"]))


@program("n4")
def largest(fd: Fd, s: Sizes) -> None:
    x = floats(fd, s.rows, s.vocab)
    outputs(fd, *fd.ops.topk(x, s.best, 1))
    split(fd, TP8, (x, [None, "tp"]))


@program("n6")
def running_sum(fd: Fd, s: Sizes) -> None:
    x = floats(fd, s.tokens, s.width)
    outputs(fd, fd.ops.cumsum(x, 0))
    on_dim0(fd, TP8, "tp", x)


__all__ = ["FULL", "PROGRAMS", "SMALL", "Program", "Sizes"]
