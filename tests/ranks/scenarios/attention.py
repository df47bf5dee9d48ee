"""Attention with sharded heads, forward and backward, in both memory orders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshfuse.nvfuser_direct import DataType, FusionDefinition
from tools import X, cut, line, place, rank, same, size, split

B, H, S, E = 2, 4, 16, 8
Layout = Callable[[torch.Tensor], torch.Tensor]


def expected(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The attention and the gradients of q, k and v, in double."""
    q, k, v, gradient = (t.double() for t in inputs)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return [t.detach() for t in (out, *torch.autograd.grad(out, leaves, gradient))]


def define(fd: FusionDefinition, shape: list[int], order: list[int]) -> list[Any]:
    """sdpfa_fwd and sdpfa_bwd of four inputs; returns these."""
    inputs = [
        fd.define_tensor(shape=shape, contiguity=True, dtype=DataType.BFloat16, stride_order=order) for _ in range(4)
    ]
    q, k, v, gradient = inputs
    dropout = fd.define_scalar(0.0, dtype=DataType.Double)
    causal = fd.define_scalar(True, dtype=DataType.Bool)
    out, lse, seed, offset = fd.ops.sdpfa_fwd(q, k, v, dropout_p=dropout, is_causal=causal, scale=None)
    gradients = fd.ops.sdpfa_bwd(gradient, q, k, v, out, lse, dropout, causal, seed, offset, scale=None)
    for y in (out, *gradients):
        fd.add_output(y)
    return inputs


def check(found: list[torch.Tensor], wanted: list[torch.Tensor], swap: Layout) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == torch.bfloat16 and swap(mine).is_contiguous()
        same(mine.double(), theirs, rtol=1.6e-2, atol=2e-2)


def swapped(t: torch.Tensor) -> torch.Tensor:
    """Heads and sequence exchanged."""
    return t.transpose(-3, -2)


def heads_as_a_leading_dim(order: tuple[int, ...] = (4, 3, 2, 1, 0), swap: Layout = torch.Tensor.detach) -> None:
    d = size()
    with FusionDefinition() as fd:
        for tv in define(fd, [d, B, H // d, S, E], list(order)):
            place(line(), tv)
            tv.axis(0).parallelize(X)
    inputs = [torch.randn(B, H, S, E).bfloat16() for _ in range(4)]

    def mine(t: torch.Tensor) -> torch.Tensor:
        return swap(swap(t.chunk(d, 1)[rank()][None]).contiguous())

    found = fd.execute([mine(t).requires_grad_() for t in inputs])
    check(found, [mine(t) for t in expected(inputs)], swap)


def heads_as_a_leading_dim_sequence_first_in_memory() -> None:
    heads_as_a_leading_dim((4, 3, 1, 2, 0), swapped)


def heads_by_loop_split(order: tuple[int, ...] = (3, 2, 1, 0), swap: Layout = torch.Tensor.detach) -> None:
    with FusionDefinition() as fd:
        tensors = define(fd, [-1, H, -1, E], list(order))
        for tv in tensors:
            place(line(), tv)
            split(tv, 1)
    inputs = [torch.randn(B, H, S, E).bfloat16() for _ in range(4)]
    found = fd.execute([swap(swap(cut(t, tv)).contiguous()) for t, tv in zip(inputs, tensors, strict=True)])
    check(found, [cut(t, tensors[0]) for t in expected(inputs)], swap)


def heads_by_loop_split_sequence_first_in_memory() -> None:
    heads_by_loop_split((3, 1, 2, 0), swapped)


def seeds_come_out_and_options_may_come_fourth() -> None:
    """The argument order from before there were bias and mask."""
    with FusionDefinition() as fd:
        q, k, v = (fd.define_tensor([B, H, S, E], dtype=DataType.Float) for _ in range(3))
        dropout = fd.define_scalar(0.0, dtype=DataType.Double)
        results = fd.ops.sdpfa_fwd(q, k, v, dropout, fd.define_scalar(False, dtype=DataType.Bool), None)
        for y in results:
            fd.add_output(y)
        for tv in (q, k, v):
            place(line(), tv)
            split(tv, 1)
    a, b, c = (torch.randn(B, H, S, E) for _ in range(3))
    out, lse, seed, offset = fd.execute([cut(a, q), cut(b, k), cut(c, v)])
    same(out, cut(F.scaled_dot_product_attention(a, b, c), q))
    scores = a @ b.transpose(-2, -1) / E**0.5
    same(lse, scores.logsumexp(-1).chunk(size(), 1)[rank()])
    assert (seed.shape, seed.dtype, offset.shape) == ((2,), torch.uint64, ())
