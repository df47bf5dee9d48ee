"""Programs run whole through the nvFuser backend, with their unsharded torch: by fake kernels, and on a GPU.

Each takes a mesh of one axis, "r"; inputs are float64 or float32, or of the given dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.dtypes import DataType

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """`define(fd, inputs, mesh)` gives the outputs; `reference(inputs)` the same in torch on whole tensors."""

    shapes: Shapes
    define: Callable[..., Sequence[mf.TensorView]]
    reference: Callable[..., Sequence[torch.Tensor]]
    scalars: tuple[float, ...] = ()

    def definition(self, mesh: mf.DeviceMesh, dtype: DataType) -> mf.FusionDefinition:
        with mf.FusionDefinition(seed=3) as fd:
            inputs = [fd.define_tensor(list(shape), dtype=dtype) for shape in self.shapes]
            numbers = [fd.define_scalar(dtype=DataType.Double) for _ in self.scalars]
            for output in self.define(fd, [*inputs, *numbers], mesh):
                fd.add_output(fd.ops.cast(output, dtype))
        return fd

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for shape in self.shapes]
        return [*(t.to(device=device, dtype=dtype) for t in made), *self.scalars]

    def expected(self, inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
        """In float64, from the very values of the inputs."""
        wide = [t.double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in inputs]
        return [t.detach() for t in self.reference(wide)]


def _mlp(fd: Any, inputs: Sequence[Any], mesh: mf.DeviceMesh) -> Sequence[mf.TensorView]:
    x, up, bias, down = inputs
    hidden = fd.ops.cast(fd.ops.gelu(fd.ops.linear(x, up, bias), "tanh"), x.dtype)
    loss = fd.ops.sum(fd.ops.mul(out := fd.ops.linear(hidden, down), out))
    fd.mesh_split(up, mesh, ["r", None])
    fd.mesh_split(bias, mesh, ["r"])
    fd.mesh_split(down, mesh, [None, "r"])
    return [loss, *fd.grad(loss, [x, up, bias, down])]


def _mlp_torch(inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
    x, up, bias, down = inputs
    loss = F.linear(F.gelu(F.linear(x, up, bias), approximate="tanh"), down).square().sum()
    return [loss, *torch.autograd.grad(loss, [x, up, bias, down])]


def _softmax(fd: Any, inputs: Sequence[Any], mesh: mf.DeviceMesh) -> Sequence[mf.TensorView]:
    x, scale = inputs
    fd.mesh_split(x, mesh, [None, "r"])
    return [fd.ops.softmax(fd.ops.mul(x, scale), -1)]


def _softmax_torch(inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
    return [torch.softmax(inputs[0] * inputs[1], -1)]


def _dropout(fd: Any, inputs: Sequence[Any], mesh: mf.DeviceMesh) -> Sequence[mf.TensorView]:
    """What is kept does not change the result: random numbers of both forms lie between ops of nvFuser."""
    (x,) = inputs
    draws = fd.ops.rand_like(fd.ops.exp(x))
    low = fd.ops.lt(draws, 0.5)
    both = fd.ops.add(fd.ops.where(low, fd.ops.neg(x), 0.0), fd.ops.where(low, 0.0, fd.ops.neg(x)))
    fd.mesh_split(x, mesh, ["r", None])
    return [both]


def _permuted(fd: Any, inputs: Sequence[Any], mesh: mf.DeviceMesh) -> Sequence[mf.TensorView]:
    """Permuted, sliced and repeated values that enter and leave segments, beside sums over a sharded dim."""
    x, y = inputs
    turned = fd.ops.permute(x, [2, 0, 1])
    total = fd.ops.sum(fd.ops.mul(turned, fd.ops.permute(y, [2, 0, 1])), [1])
    wide = fd.ops.broadcast_in_dim(total, [5, 3, 6], [0, 2])
    fd.mesh_split(x, mesh, ["r", None, None])
    fd.mesh_split(y, mesh, ["r", None, None])
    return [fd.ops.slice(turned, [1, 0, 0], [4, 7, 6]), fd.ops.permute(wide, [2, 1, 0]), fd.ops.tanh(total)]


def _permuted_torch(inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
    x, y = (t.permute(2, 0, 1) for t in inputs)
    total = (x * y).sum(1)
    return [x[1:4], total[:, None].expand(5, 3, 6).permute(2, 1, 0), total.tanh()]


HEADS, WIDTH, LENGTH = 4, 16, 6


def _block(fd: Any, inputs: Sequence[Any], mesh: mf.DeviceMesh) -> Sequence[mf.TensorView]:
    """A pre-norm transformer block of the GPT example, attention and MLP over heads and hidden columns; fwd + bwd."""
    x, gain, shift, q, k, v, o, up, down = inputs
    normed = _norm(fd, x, gain, shift)
    heads = [
        fd.ops.permute(fd.ops.reshape(fd.ops.linear(normed, w), [2, LENGTH, HEADS, WIDTH // HEADS]), [0, 2, 1, 3])
        for w in (q, k, v)
    ]  # fmt: skip
    scores = fd.ops.mul(fd.ops.matmul(heads[0], fd.ops.permute(heads[1], [0, 1, 3, 2])), (WIDTH // HEADS) ** -0.5)
    later = fd.ops.triu(fd.ops.full([LENGTH, LENGTH], True, DataType.Bool), 1)
    shares = fd.ops.cast(fd.ops.softmax(fd.ops.where(later, -math.inf, scores), -1), q.dtype)
    mixed = fd.ops.permute(fd.ops.matmul(shares, heads[2]), [0, 2, 1, 3])
    x = fd.ops.add(x, fd.ops.linear(fd.ops.reshape(mixed, [2, LENGTH, WIDTH]), o))
    hidden = fd.ops.cast(fd.ops.gelu(fd.ops.linear(_norm(fd, x, gain, shift), up), "tanh"), q.dtype)
    out = fd.ops.add(x, fd.ops.linear(hidden, down))
    loss = fd.ops.sum(fd.ops.mul(out, out))
    for weight, dims in [(q, ["r", None]), (k, ["r", None]), (v, ["r", None]), (o, [None, "r"]),
                         (up, ["r", None]), (down, [None, "r"])]:  # fmt: skip
        fd.mesh_split(weight, mesh, dims)
    return [out, *fd.grad(loss, list(inputs))]


def _norm(fd: Any, x: Any, gain: Any, shift: Any) -> Any:
    """Statistics of half precision are of Float, as nvFuser has them."""
    wide = fd.ops.cast(x, DataType.Double if x.dtype is DataType.Double else DataType.Float)
    variance, mean = fd.ops.var_mean(wide, [-1], correction=0, keepdim=True)
    return fd.ops.cast((wide - mean) * fd.ops.rsqrt(variance + 1e-5) * gain + shift, gain.dtype)


def _block_torch(inputs: Sequence[Any]) -> Sequence[torch.Tensor]:
    x, gain, shift, q, k, v, o, up, down = inputs
    normed = F.layer_norm(x, (WIDTH,), gain, shift)
    q, k, v = (F.linear(normed, w).unflatten(2, (HEADS, -1)).transpose(1, 2) for w in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    out = x + F.linear(mixed, o)
    out = out + F.linear(F.gelu(F.linear(F.layer_norm(out, (WIDTH,), gain, shift), up), approximate="tanh"), down)
    return [out, *torch.autograd.grad(out.square().sum(), list(inputs))]


_W = (WIDTH, WIDTH)
PROGRAMS = {
    "mlp": Whole(((6, 8), (12, 8), (12,), (8, 12)), _mlp, _mlp_torch),
    "softmax": Whole(((5, 10),), _softmax, _softmax_torch, (1.5,)),
    "dropout": Whole(((6, 4),), _dropout, lambda inputs: [-inputs[0]]),
    "permuted": Whole(((7, 6, 5), (7, 6, 5)), _permuted, _permuted_torch),
    "block": Whole(
        ((2, LENGTH, WIDTH), (WIDTH,), (WIDTH,), _W, _W, _W, _W, (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)),
        _block, _block_torch,
    ),
}  # fmt: skip


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Values in the tolerance of the type, relative to the largest of each tensor."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.dtype is dtype and a.shape == b.shape
        error = (a.double().cpu() - b.cpu()).abs().max() / b.abs().max().clamp_min(1e-3).cpu()
        assert error <= tolerance, (place, error)
