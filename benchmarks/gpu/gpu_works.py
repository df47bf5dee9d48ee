"""What is measured on a GPU: each work as a definition of ours and as a function of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.dtypes import DataType

BF16 = DataType.BFloat16


@dataclass(frozen=True, slots=True)
class Work:
    """`define(fd, inputs)` gives the outputs, of one segment; `by_hand(*inputs)` the same in torch.

    `shapes` are bfloat16 tensors'. Elementwise work moves its inputs and outputs once at best.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    define: Callable[[Any, Sequence[Any]], Sequence[Any]]
    by_hand: Callable[..., Sequence[torch.Tensor]]

    def definition(self) -> mf.FusionDefinition:
        mesh = mf.DeviceMesh((1,), ("r",))
        with mf.FusionDefinition() as fd:
            inputs = [fd.define_tensor(list(shape), dtype=BF16) for shape in self.shapes]
            for output in self.define(fd, inputs):
                fd.add_output(fd.ops.cast(output, BF16))
            for tensor in inputs:
                fd.mesh_split(tensor, mesh, [None] * tensor.ndim)
        return fd

    def inputs(self, device: str = "cuda") -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(1)
        return [
            torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16()
            for shape in self.shapes
        ]


def _wide(fd: Any, x: Any) -> Any:
    return fd.ops.cast(x, DataType.Float)


def _bias_gelu(fd: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    x, bias, y = (_wide(fd, t) for t in inputs)
    return [fd.ops.gelu(x + bias, "tanh") * y + x]


def _bias_gelu_torch(x: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    return [F.gelu(x + bias, approximate="tanh") * y + x]


def _layer_norm(fd: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    return [norm(fd, *inputs)]


def _layer_norm_torch(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor) -> Sequence[torch.Tensor]:
    return [F.layer_norm(x, x.shape[-1:], gain, shift)]


def _softmax(fd: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    return [fd.ops.softmax(_wide(fd, inputs[0]) * 0.125, -1)]


def _softmax_torch(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return [torch.softmax(x * 0.125, -1)]


def elementwise(rows: int, width: int) -> list[Work]:
    """Pointwise and normalising works on [rows, width]."""
    full, vector = (rows, width), (width,)
    return [
        Work("bias_gelu_gate", (full, vector, full), _bias_gelu, _bias_gelu_torch),
        Work("layer_norm", (full, vector, vector), _layer_norm, _layer_norm_torch),
        Work("softmax", (full,), _softmax, _softmax_torch),
    ]


def norm(fd: Any, x: Any, gain: Any, shift: Any) -> Any:
    variance, mean = fd.ops.var_mean(_wide(fd, x), [-1], correction=0, keepdim=True)
    return fd.ops.cast((_wide(fd, x) - mean) * fd.ops.rsqrt(variance + 1e-5) * gain + shift, BF16)


@dataclass(frozen=True, slots=True)
class Block:
    """A GPT block's sizes: inputs x [batch, length, width], gain and shift [width], q k v o, up and down.

    fused: its attention is one op, as it is in torch; else products and a softmax.
    """

    batch: int = 4
    length: int = 256
    width: int = 512
    heads: int = 8
    fused: bool = True

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        w, square = self.width, (self.width, self.width)
        return ((self.batch, self.length, w), (w,), (w,), square, square, square, square, (4 * w, w), (w, 4 * w))

    def definition(self, ranks: int) -> mf.FusionDefinition:
        """Forward and backward, heads and hidden columns over the ranks. Outputs: out, then gradients by inputs."""
        mesh = mf.DeviceMesh((ranks,), ("r",))
        with mf.FusionDefinition() as fd:
            inputs = [fd.define_tensor(list(shape), dtype=BF16) for shape in self.shapes]
            out = self._forward(fd, inputs)
            loss = fd.ops.sum(_wide(fd, out) * _wide(fd, out))
            for output in (out, *fd.grad(loss, inputs)):
                fd.add_output(output)
            rows, columns = ["r", None], [None, "r"]
            for tensor, dims in zip(inputs[3:], (rows, rows, rows, columns, rows, columns), strict=True):
                fd.mesh_split(tensor, mesh, dims)
        return fd

    def _forward(self, fd: Any, inputs: Sequence[Any]) -> Any:
        x, gain, shift, q, k, v, o, up, down = inputs
        normed, each = norm(fd, x, gain, shift), self.width // self.heads
        parts = [
            fd.ops.reshape(fd.ops.linear(normed, w), [self.batch, self.length, self.heads, each]) for w in (q, k, v)
        ]
        q, k, v = (fd.ops.permute(part, [0, 2, 1, 3]) for part in parts)
        mixed = fd.ops.permute(self._attention(fd, q, k, v), [0, 2, 1, 3])
        merged = fd.ops.linear(fd.ops.reshape(mixed, [self.batch, self.length, self.width]), o)
        x = fd.ops.cast(x + merged, BF16)
        hidden = fd.ops.cast(fd.ops.gelu(fd.ops.linear(norm(fd, x, gain, shift), up), "tanh"), BF16)
        return fd.ops.cast(x + fd.ops.linear(hidden, down), BF16)

    def _attention(self, fd: Any, q: Any, k: Any, v: Any) -> Any:
        if self.fused:
            return fd.ops.sdpfa_fwd(q, k, v, is_causal=True)[0]
        scores = _wide(fd, fd.ops.matmul(q, fd.ops.permute(k, [0, 1, 3, 2]))) * (self.width // self.heads) ** -0.5
        later = fd.ops.triu(fd.ops.full([self.length, self.length], True, DataType.Bool), 1)
        shares = fd.ops.cast(fd.ops.softmax(fd.ops.where(later, -math.inf, scores), -1), BF16)
        return fd.ops.matmul(shares, v)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The block in torch, in the inputs' dtype."""
        x, gain, shift, q, k, v, o, up, down = inputs
        normed = F.layer_norm(x, (self.width,), gain, shift)
        q, k, v = (F.linear(normed, w).unflatten(2, (self.heads, -1)).transpose(1, 2) for w in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, o)
        normed = F.layer_norm(x, (self.width,), gain, shift)
        return x + F.linear(F.gelu(F.linear(normed, up), approximate="tanh"), down)

    def by_hand(self, *inputs: torch.Tensor, forward: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Out and gradients by torch's autograd, of `forward` (which may be compiled)."""
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = (forward or self.forward)(*leaves)
        loss = (out.float() if out.dtype is torch.bfloat16 else out).square().sum()
        return [out.detach(), *torch.autograd.grad(loss, leaves)]

    def inputs(self, device: str = "cuda") -> list[torch.Tensor]:
        generator = torch.Generator(device).manual_seed(1)
        scale = [1.0, 1.0, 1.0, *[self.width**-0.5] * 5, (4 * self.width) ** -0.5]
        return [
            (torch.randn(shape, generator=generator, device=device) * s).bfloat16()
            for shape, s in zip(self.shapes, scale, strict=True)
        ]


BLOCKS = {"large": Block(8, 1024, 2048, 16), "small": Block()}
