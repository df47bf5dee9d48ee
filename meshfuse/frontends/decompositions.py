"""Which aten ops are written in others while a graph is captured: all that can be, but for those that have a rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from .aten import has_rule

# Decompositions that are wrong for a joint graph: flash attention's on a CPU gives wrong gradients. Those of ops that
# change the layout in memory or draw numbers of other distributions come out in ops that have no rule either.
_WRONG = (
    "_scaled_dot_product_flash_attention_for_cpu", "as_strided_scatter", "dropout", "alpha_dropout", "unfold",
)  # fmt: skip


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of g v / |v|, whose norms are along all dims but one."""
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    along = (grad * v).sum(others, keepdim=True) / norms
    return g / norms * (grad - v * along / norms), along.to(g.dtype)


def _trilinear(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, wider_a: list[int], wider_b: list[int], wider_c: list[int],
    summed: list[int], unroll_dim: int = 1,
) -> torch.Tensor:  # fmt: skip
    """The sum along some dims of the product of three tensors, each with dims of size 1 added."""
    for dim in wider_a:
        a = a.unsqueeze(dim)
    for dim in wider_b:
        b = b.unsqueeze(dim)
    for dim in wider_c:
        c = c.unsqueeze(dim)
    return (a * b * c).sum(summed)


def _polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return torch.complex(size * angle.cos(), size * angle.sin())


def _unfold(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    """Windows of a dim: as many rows as there are, each of which is looked up."""
    starts = torch.arange(0, x.shape[dim] - size + 1, step, device=x.device)
    places = (starts[:, None] + torch.arange(size, device=x.device)).flatten()
    found = x.index_select(dim, places).unflatten(dim, (len(starts), size))
    return found.movedim(dim % x.ndim + 1, -1)


def _diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """A diagonal: all else of the square around it is 0, and then summed."""
    x = x.movedim((dim1, dim2), (-2, -1))
    return torch.where(_eye(x, offset), _square(x, offset), x.new_zeros(())).sum(-1, dtype=x.dtype)


def _square(x: torch.Tensor, offset: int) -> torch.Tensor:
    rows, columns = x.shape[-2:]
    top, left = max(-offset, 0), max(offset, 0)
    n = max(min(rows - top, columns - left), 0)
    return x[..., top : top + n, left : left + n]


def _eye(x: torch.Tensor, offset: int) -> torch.Tensor:
    n = _square(x, offset).shape[-1]
    return torch.arange(n, device=x.device)[:, None] == torch.arange(n, device=x.device)


def _diagonal_backward(grad: torch.Tensor, sizes: list[int], offset: int, dim1: int, dim2: int) -> torch.Tensor:
    order = [n for d, n in enumerate(sizes) if d not in (dim1 % len(sizes), dim2 % len(sizes))]
    whole = grad.new_zeros((*order, sizes[dim1], sizes[dim2]))
    square = torch.where(_eye(whole, offset), grad.unsqueeze(-1), grad.new_zeros(()))
    top, left = max(-offset, 0), max(offset, 0)
    n = square.shape[-1]
    pads = (left, sizes[dim2] - left - n, top, sizes[dim1] - top - n)
    return torch.nn.functional.pad(square, pads).movedim((-2, -1), (dim1, dim2))


def _diagonal_scatter(
    x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:  # fmt: skip
    """A tensor with another diagonal."""
    is_on = _diagonal_backward(torch.ones_like(source, dtype=torch.bool), [*x.shape], offset, dim1, dim2)
    return torch.where(is_on, _diagonal_backward(source.to(x.dtype), [*x.shape], offset, dim1, dim2), x)


_ATEN = torch.ops.aten
# torch has none, or ones that come out in views of parts of memory.
_OWN: dict[Any, Callable[..., Any]] = {
    _ATEN._weight_norm_interface_backward.default: _weight_norm_backward, _ATEN._trilinear.default: _trilinear,
    _ATEN.polar.default: _polar, _ATEN.unfold.default: _unfold, _ATEN.diagonal.default: _diagonal,
    _ATEN.diagonal_backward.default: _diagonal_backward, _ATEN.diagonal_scatter.default: _diagonal_scatter,
}  # fmt: skip


@functools.cache
def _all() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of aten ops, the core ones before others."""
    others = {op: function for op, function in decomposition_table.items() if str(op).startswith("aten.")}
    found = others | dict(core_aten_decompositions()) | _OWN
    return {op: function for op, function in found.items() if op in _OWN or _name(op) not in _WRONG}


def _name(op: Any) -> str:
    return str(op).removeprefix("aten.").partition(".")[0]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of all ops that have no rule."""
    return {op: function for op, function in _all().items() if not has_rule(op)}
