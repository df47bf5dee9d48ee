"""Ops as users make them of torch functions, one of each kind of rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import meshfuse as mf
from meshfuse.ops.opdef import Call

DOUBLE = mf.DataType.Double


def tensor(*shape: int, dtype: mf.DataType = DOUBLE) -> mf.TensorType:
    return mf.TensorType(shape, dtype)


def _edges(call: Call) -> dict[str, tuple[int, int]]:
    height, width = call.type_of("weight").shape[1:]  # type: ignore[union-attr]
    return {"h": ((height - 1) // 2, height // 2), "w": ((width - 1) // 2, width // 2)}


@mf.torch_op(
    "b c h~ w~, c i j -> b c h w", blocked="i j", halo=_edges, partial=mf.Partial.EACH,
    samples=[mf.Sample((tensor(1, 2, 5, 4), tensor(2, 3, 2)))],
)  # fmt: skip
def depthwise_conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight[:, None], groups=weight.shape[0])


@mf.torch_op("b* k, n k -> b* n", samples=[mf.Sample((tensor(2, 4, 6), tensor(3, 6)))], partial=mf.Partial.EACH)
def scaled_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x @ weight.T * scale


@mf.torch_op("n t~, n t -> n t", halo={"t": (2, 0)}, fill=1.0, samples=[mf.Sample((tensor(3, 7), tensor(3, 7)))])
def previous_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Nonlinear, sees two elements back, and takes an operand without neighbours beside."""
    return x[:, :-2] * x[:, 2:] * y


@mf.torch_op("n k -> n, n", reduce="max", samples=[mf.Sample((tensor(4, 6),))])
def extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.amax(1), x.abs().amax(1)


@mf.torch_op(
    "(h d) n -> h d n", blocked="d", sizes=lambda call: {"d": call["width"]}, samples=[mf.Sample((tensor(6, 4), 3))]
)
def split_heads(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.reshape(-1, width, x.shape[1])


@mf.torch_op("n k -> n", samples=[mf.Sample((tensor(2, 5, dtype=mf.DataType.ComplexFloat),))])
def total(x: torch.Tensor) -> torch.Tensor:
    """Of complex numbers, some ranks having none."""
    return x.sum(1)


USERS = [depthwise_conv2d, scaled_product, previous_product, extremes, split_heads, total]
