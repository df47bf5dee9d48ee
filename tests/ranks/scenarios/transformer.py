"""A GPT block as one definition, forward and backward, tensor- and sequence-parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from meshfuse.nvfuser_direct import DataType, FusionDefinition, PythonProfiler
from tools import communications, cut, line, place, same, size, split

B, S, H, E = 2, 16, 4, 64
# In the order of definition; q, k and v of a head stand together in the first linear's features.
SHAPES = {
    "norm0_w": [E], "norm0_b": [E], "qkv_w": [3 * E, E], "qkv_b": [3 * E], "out_w": [E, E], "out_b": [E],
    "norm1_w": [E], "norm1_b": [E], "up_w": [4 * E, E], "up_b": [4 * E], "down_w": [E, 4 * E], "down_b": [E],
}  # fmt: skip
COLUMN, ROW = ("qkv_w", "qkv_b", "up_w", "up_b"), ("out_w", "down_w")


@dataclass
class Norm:
    """What the backward of a layer norm needs."""

    hat: Any
    rstd: Any
    w: Any


class Block:
    """The ops of the block; `fd.ops` calls in the form that Thunder writes them."""

    def __init__(self, fd: FusionDefinition, dropout: float, dtype: DataType):
        self.fd, self.ops, self.dropout, self.dtype = fd, fd.ops, dropout, dtype
        self.masks: list[Any] = []
        self.x = fd.define_tensor(shape=[B, S, E], contiguity=True, dtype=dtype, stride_order=[2, 1, 0])
        self.w = {name: fd.define_tensor(shape=shape, contiguity=True, dtype=dtype) for name, shape in SHAPES.items()}

    def low(self, x: Any) -> Any:
        return self.ops.cast(x, dtype=self.dtype)

    def high(self, x: Any) -> Any:
        return self.ops.cast(x, dtype=DataType.Float)

    def wide(self, x: Any, dims: list[int]) -> Any:
        return self.ops.broadcast_in_dim(x, shape=[B, S, E], broadcast_dims=dims)

    def row_mean(self, x: Any) -> Any:
        total = self.ops.mul(self.ops.sum(x, dims=[2], keepdim=False), 1 / E)
        return self.wide(self.ops.broadcast_in_dim(total, shape=[B, S, 1], broadcast_dims=[0, 1]), [0, 1, 2])

    def norm(self, x: Any, name: str) -> tuple[Any, Norm]:
        ops = self.ops
        var, mean = ops.var_mean(x, dims=[2], correction=0, keepdim=False)
        column = ops.broadcast_in_dim(var, shape=[B, S, 1], broadcast_dims=[0, 1])
        rstd = ops.rsqrt(ops.add(column, self.fd.define_scalar(1e-5, dtype=DataType.Double)))
        centred = ops.sub(x, self.wide(ops.broadcast_in_dim(mean, [B, S, 1], [0, 1]), [0, 1, 2]))
        hat = ops.mul(centred, self.wide(rstd, [0, 1, 2]))
        w, b = (self.high(self.wide(self.w[f"{name}_{part}"], [2])) for part in "wb")
        return self.low(ops.add(ops.mul(hat, w), b)), Norm(hat, self.wide(rstd, [0, 1, 2]), w)

    def heads(self, qkv: Any) -> list[Any]:
        e = E // H
        parts = self.ops.reshape(qkv, new_shape=[B, S, H, 3 * e])
        cuts = [self.ops.slice(parts, [0, 0, 0, i * e], [B, S, H, (i + 1) * e]) for i in range(3)]
        return [self.ops.permute(part, dims=[0, 2, 1, 3]) for part in cuts]

    def dropped(self, x: Any) -> Any:
        if not self.dropout:
            return self.high(x)
        drawn = self.ops.uniform(0.0, 1.0, shape=[B, S, E], dtype=self.dtype)
        mask = self.ops.lt(drawn, self.fd.define_scalar(1 - self.dropout, dtype=DataType.Double))
        self.masks.append(mask)
        return self.ops.mul(self.ops.mul(self.high(x), self.high(mask)), 1 / (1 - self.dropout))

    def gelu(self, x: Any) -> tuple[Any, Any]:
        """(the value, the derivative)"""
        ops = self.ops
        square = ops.mul(x, x)
        inner = ops.mul(0.7978845608, ops.add(x, ops.mul(0.044715, ops.mul(square, x))))
        t = ops.tanh(inner)
        slope = ops.mul(0.7978845608, ops.add(1.0, ops.mul(0.134145, square)))
        bent = ops.mul(ops.mul(ops.mul(0.5, x), ops.sub(1.0, ops.mul(t, t))), slope)
        half = ops.mul(0.5, ops.add(1.0, t))
        return ops.mul(x, half), ops.add(half, bent)

    def forward(self) -> list[Any]:
        """The result last; what comes before is what a backward would keep."""
        ops, w = self.ops, self.w
        wide = self.high(self.x)
        self.normed0, self.norm0 = self.norm(wide, "norm0")
        qkv = ops.linear(self.normed0, w["qkv_w"], w["qkv_b"])
        self.qkv = self.heads(qkv)
        chance = self.fd.define_scalar(self.dropout, dtype=DataType.Double)
        self.attention = ops.sdpfa_fwd(*self.qkv, dropout_p=chance, is_causal=True, scale=None)
        merged = ops.stride_order(ops.permute(self.attention[0], dims=[0, 2, 1, 3]), [3, 2, 1, 0])
        self.merged = ops.reshape(merged, new_shape=[B, S, E])
        out = ops.linear(self.merged, w["out_w"], w["out_b"])
        self.middle = ops.add(wide, self.dropped(out))
        self.normed1, self.norm1 = self.norm(self.middle, "norm1")
        up = ops.linear(self.normed1, w["up_w"], w["up_b"])
        value, self.slope = self.gelu(self.high(up))
        self.hidden = self.low(value)
        down = ops.linear(self.hidden, w["down_w"], w["down_b"])
        result = self.low(ops.add(self.middle, self.dropped(down)))
        return [qkv, *self.attention, out, up, result]

    def linear_grads(self, grad: Any, x: Any, name: str) -> tuple[Any, Any, Any]:
        """Of the operand, the weight and the bias."""
        ops, (features, inner) = self.ops, SHAPES[f"{name}_w"]
        flat = ops.permute(ops.reshape(grad, [B * S, features]), [1, 0])
        weight = ops.matmul(flat, ops.reshape(x, [B * S, inner]))
        return ops.matmul(grad, self.w[f"{name}_w"]), weight, ops.sum(self.high(grad), dims=[0, 1])

    def norm_grads(self, grad: Any, norm: Norm) -> tuple[Any, Any, Any]:
        ops, grad = self.ops, self.high(grad)
        scaled = ops.mul(grad, norm.w)
        off = ops.add(self.row_mean(scaled), ops.mul(norm.hat, self.row_mean(ops.mul(scaled, norm.hat))))
        x = ops.mul(norm.rstd, ops.sub(scaled, off))
        return x, ops.sum(ops.mul(grad, norm.hat), dims=[0, 1]), ops.sum(grad, dims=[0, 1])

    def backward(self, grad: Any) -> list[Any]:
        """Gradients of x and of the weights in their order, without dropout."""
        ops, wide = self.ops, self.high(grad)
        hidden, down_w, down_b = self.linear_grads(grad, self.hidden, "down")
        bent = self.low(ops.mul(self.high(hidden), self.slope))
        normed1, up_w, up_b = self.linear_grads(bent, self.normed1, "up")
        through, norm1_w, norm1_b = self.norm_grads(normed1, self.norm1)
        middle = ops.add(wide, through)
        merged, out_w, out_b = self.linear_grads(self.low(middle), self.merged, "out")
        split_ = ops.permute(ops.reshape(merged, [B, S, H, E // H]), [0, 2, 1, 3])
        result, lse, seed, offset = self.attention
        grads = ops.sdpfa_bwd(split_, *self.qkv, result, lse, 0.0, True, seed, offset, None)
        joined = ops.cat([ops.permute(g, [0, 2, 1, 3]) for g in grads], dim=3)
        normed0, qkv_w, qkv_b = self.linear_grads(ops.reshape(joined, [B, S, 3 * E]), self.normed0, "qkv")
        first, norm0_w, norm0_b = self.norm_grads(normed0, self.norm0)
        weights = [norm0_w, norm0_b, qkv_w, qkv_b, out_w, out_b]
        weights += [norm1_w, norm1_b, up_w, up_b, down_w, down_b]
        return [ops.add(middle, first), *weights]

    def schedule(self, sequence: bool) -> None:
        place(line(), self.x, *self.w.values())
        for name in (*COLUMN, *ROW):
            split(self.w[name], -1 if name in ROW else 0)
        if sequence:
            split(self.x, 1)

    def values(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        dtype = getattr(torch, self.dtype.value)
        weights = {name: (torch.randn(shape) / 8).to(dtype) for name, shape in SHAPES.items()}
        return torch.randn(B, S, E).to(dtype), weights

    def arguments(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [cut(x, self.x), *(cut(weights[name], tv) for name, tv in self.w.items())]


def block_torch(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    y = F.layer_norm(x, (E,), w["norm0_w"], w["norm0_b"])
    qkv = F.linear(y, w["qkv_w"], w["qkv_b"]).view(B, S, H, 3 * E // H).transpose(1, 2).chunk(3, -1)
    y = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(B, S, E)
    x = x + F.linear(y, w["out_w"], w["out_b"])
    y = F.layer_norm(x, (E,), w["norm1_w"], w["norm1_b"])
    y = F.gelu(F.linear(y, w["up_w"], w["up_b"]), approximate="tanh")
    return x + F.linear(y, w["down_w"], w["down_b"])


def reductions(kinds: list[str]) -> list[str]:
    """A reduce-scatter and an all-gather are the bytes of an all-reduce, with less to compute in between."""
    return " ".join(kinds).replace("reduce-scatter all-gather", "all-reduce").split()


def forward(sequence: bool = False) -> None:
    with FusionDefinition() as fd:
        block = Block(fd, 0.0, DataType.Float)
        result = block.forward()[-1]
        fd.add_output(result)
        block.schedule(sequence)
        if sequence:
            place(line(), result)
            split(result, 1)
    x, weights = block.values()
    with PythonProfiler() as profiler:
        (found,) = fd.execute(block.arguments(x, weights))
    same(found, cut(block_torch(x, weights), result), rtol=1e-3, atol=1e-3)
    if not sequence:
        kinds = reductions(communications(profiler))
        assert kinds == ["all-reduce", "all-reduce"] * (size() > 1), kinds
    elif size() > 1:
        first, *middle, last = communications(profiler)
        assert (first, last) == ("all-gather", "reduce-scatter")
        assert middle in (["reduce-scatter", "all-gather"], ["all-reduce"]), middle  # The same bytes.


def forward_with_the_sequence_split() -> None:
    forward(sequence=True)


def forward_with_dropout_and_what_a_backward_keeps(sequence: bool = False) -> None:
    with FusionDefinition() as fd:
        block = Block(fd, 0.1, DataType.BFloat16)
        for y in (*block.forward(), *block.masks):
            fd.add_output(y)
        block.schedule(sequence)
    x, weights = block.values()
    found = fd.validate(block.arguments(x, weights), rtol=0.05, atol=0.1)
    heads = H // size()
    half, whole = torch.bfloat16, (B, S // size() if sequence else S, E)
    wanted = [((B, S, 3 * E // size()), half), ((B, heads, S, E // H), half), ((B, heads, S), torch.float32)]
    wanted += [((2,), torch.uint64), ((), torch.uint64), (whole, half), ((B, S, 4 * E // size()), half), (whole, half)]
    wanted += [(whole, torch.bool)] * 2
    assert [(tuple(t.shape), t.dtype) for t in found] == wanted


def forward_with_dropout_and_the_sequence_split() -> None:
    """Only inputs are annotated: what is added to the split residual lies as it does."""
    forward_with_dropout_and_what_a_backward_keeps(sequence=True)


def unannotated_gradients(sequence: bool = False) -> None:
    """They are cut as their tensors are, and sums over ranks are whole."""
    with FusionDefinition() as fd:
        block = Block(fd, 0.0, DataType.BFloat16)
        block.forward()
        upstream = fd.define_tensor([B, S, E], dtype=DataType.BFloat16)
        for y in block.backward(upstream):
            fd.add_output(y)
        block.schedule(sequence)
        place(line(), upstream)
        if sequence:
            split(upstream, 1)
    x, weights = block.values()
    arguments = block.arguments(x, weights)
    found = fd.execute([*arguments, cut(torch.randn(B, S, E).bfloat16(), upstream)])
    assert [t.shape for t in found] == [t.shape for t in arguments]


def unannotated_gradients_with_the_sequence_split() -> None:
    unannotated_gradients(sequence=True)


def backward(sequence: bool = False) -> None:
    with FusionDefinition() as fd:
        block = Block(fd, 0.0, DataType.Float)
        block.forward()
        grad = fd.define_tensor([B, S, E])
        grads = block.backward(grad)
        for y in grads:
            fd.add_output(y)
        block.schedule(sequence)
        place(line(), grad, *grads)
        for tv, like in zip(grads, [block.x, *block.w.values()], strict=True):
            _like(tv, like)
        if sequence:
            split(grad, 1)
    x, weights = block.values()
    leaves = [x.requires_grad_(), *(weights[name].requires_grad_() for name in SHAPES)]
    upstream = torch.randn(B, S, E)
    wanted = torch.autograd.grad(block_torch(x, weights), leaves, upstream)
    with PythonProfiler() as profiler:
        found = fd.execute([*block.arguments(x, weights), cut(upstream, grad)])
    same(found, [cut(t, tv) for t, tv in zip(wanted, grads, strict=True)], rtol=1e-3, atol=1e-3)
    # As Megatron: an all-reduce after attention, and one before it and before the MLP on the way back.
    kinds = reductions(communications(profiler))
    assert sequence or kinds == ["all-reduce"] * 3 * (size() > 1), kinds
    assert sequence or fd.bill().total <= 3 * 2 * (size() - 1) / size() * 4 * B * S * E, fd.bill()


def _like(tv: Any, primal: Any) -> None:
    """The gradient is cut as what it is the gradient of; its axes also are the dims that it sums over."""
    sharding = primal.fd.recording.annotations[primal.id].named()
    kept = [n for n, axis in enumerate(tv.get_loop_domain()) if not axis.is_reduction()]
    for dim, layout in enumerate(sharding):
        if any(part.bound for part in layout):
            split(tv, kept[dim])


def backward_with_the_sequence_split() -> None:
    backward(sequence=True)
