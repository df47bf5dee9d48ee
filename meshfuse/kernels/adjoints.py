"""Local computations of `ops.adjoints`: gradients of look-ups are added up where the look-up read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .indices import Runs, local_place, local_places


def _accumulating(x: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 where it is of half precision: many terms are to be summed."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def contract(a: torch.Tensor, b: torch.Tensor, dims: int) -> torch.Tensor:
    """[*r, *m] and [*r, *n] to [*m, *n]: products summed over the first `dims` dims."""
    shape = (*a.shape[dims:], *b.shape[dims:])
    rows = a.shape[:dims].numel()
    left, right = a.reshape(rows, a.shape[dims:].numel()), b.reshape(rows, b.shape[dims:].numel())
    return torch.matmul(left.T, right).reshape(shape)


def take_bwd(grad: torch.Tensor, index: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """Add every element of `grad` at the place in `dim` that `index` names; the index broadcasts in the other dims.

    Of the result the rank has the indices in `runs`, and leaves out what belongs elsewhere.
    """
    places, inside = local_places(index, runs)
    wide = _accumulating(grad)
    size = sum(stop - start for start, stop in runs)
    shape = [size if d == dim else n for d, n in enumerate(grad.shape)]
    out = wide.new_zeros(shape)
    if size:
        out.scatter_add_(dim, places.expand(grad.shape), torch.where(inside, wide, 0))
    return out.to(grad.dtype)


def select_bwd(grad: torch.Tensor, index: int, dim: int, runs: Runs) -> torch.Tensor:
    """Zeros with a new dim, of which the rank has the indices in `runs`, and with `grad` at one index of it."""
    size = sum(stop - start for start, stop in runs)
    out = grad.new_zeros([*grad.shape[:dim], size, *grad.shape[dim:]])
    place = local_place(index, runs)
    return out if place is None else out.select_scatter(grad, dim, place)


def embedding_bwd(grad: torch.Tensor, index: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Add the rows of `grad` [.., D] to the rows that `index` [..] names; the rank has the rows in `runs`."""
    places, inside = local_places(index.reshape(-1), runs)
    wide = _accumulating(grad.reshape(len(places), grad.shape[-1]))
    out = wide.new_zeros(sum(stop - start for start, stop in runs), grad.shape[-1])
    return out.index_add_(0, places[inside], wide[inside]).to(grad.dtype)


def backward_of(function: Callable[..., Any], count: int, operand: int) -> Callable[..., torch.Tensor]:
    """A function's gradient by operand number `operand`, called on its `count` results' gradients and its operands."""

    def backward(*args: Any) -> torch.Tensor:
        grads, rest = args[:count], list(args[count:])
        with torch.enable_grad():
            rest[operand] = leaf = rest[operand].detach().requires_grad_()
            made = function(*rest)
            pairs = zip(made if isinstance(made, (tuple, list)) else (made,), grads, strict=True)
            used = [(result, grad) for result, grad in pairs if result.requires_grad]
            results, given = [r for r, _ in used], [g for _, g in used]
            found = torch.autograd.grad(results, [leaf], given, allow_unused=True) if used else [None]
        return torch.zeros_like(leaf) if found[0] is None else found[0]

    return backward
