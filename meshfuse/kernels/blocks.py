"""Local computations on the blocks of a dim (`ops.blocks`). A rank holds some consecutive blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .indices import Runs, global_index
from .reductions import highest, lowest, neutral_element, reduce_max, reduce_min, reduce_prod, scan


def _in_blocks(x: torch.Tensor, dim: int, block: int, count: int, fill: Any) -> torch.Tensor:
    """The dim as [count, block]; what it lacks at its end is `fill`."""
    missing = count * block - x.shape[dim]
    shape = list(x.shape)
    if missing:
        shape[dim] = missing
        x = torch.cat([x, x.new_full(shape, fill)], dim)
    return x.reshape(*shape[:dim], count, block, *shape[dim + 1 :])


def block_scan(x: torch.Tensor, dim: int, block: int, name: str) -> torch.Tensor:
    """A scan along a dim that starts again at every block."""
    n = x.shape[dim]
    if not n:
        return x
    parts = _in_blocks(x, dim, block, -(-n // block), 0)
    done = scan(name, parts, dim + 1, None)
    return done.flatten(dim, dim + 1).narrow(dim, 0, n)


def block_total(x: torch.Tensor, dim: int, block: int, count: int, reduce: str) -> torch.Tensor:
    """Every block of a dim reduced to one element; a block without elements gives the neutral element."""
    parts = _in_blocks(x, dim, block, count, neutral_element(reduce, x.dtype))
    functions = {"sum": torch.sum, "prod": reduce_prod, "max": reduce_max, "min": reduce_min}
    return functions[reduce](parts, [dim + 1], False).to(x.dtype)


def block_repeat(x: torch.Tensor, dim: int, block: int, size: int) -> torch.Tensor:
    """Each block's one element repeated to all places of the block, `size` places in all."""
    return x.repeat_interleave(block, dim).narrow(dim, 0, size)


def block_topk(
    x: torch.Tensor, k: int, dim: int, largest: bool, block: int, blocks: Runs
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, global indices) of the first k elements of each block in sorted order.

    `blocks` are the runs of the rank's block numbers. A block with fewer than k elements is filled up with what sorts
    last. Only empty blocks come after it, so a stable sort over all blocks puts no filling before an element.
    """
    numbers = global_index(blocks, x.device)
    parts = _in_blocks(x, dim, block, len(numbers), _last(x.dtype, largest))
    place = torch.argsort(parts, dim=dim + 1, descending=largest, stable=True).narrow(dim + 1, 0, k)
    start = (numbers * block).reshape([-1, *[1] * (x.ndim - dim)])
    return parts.gather(dim + 1, place).flatten(dim, dim + 1), (place + start).flatten(dim, dim + 1)


def block_moments(x: torch.Tensor, dims: list[int], dim: int, block: int, count: int) -> torch.Tensor:
    """[count, 2, ...]: for each block of `dim` the mean over `dims`, and the sum of squared differences from it.

    An empty block gives zeros. No op here writes into its operand, as compilers of segments could not trace that.
    """
    if count == 1 and x.shape[dim]:
        return _moments(x, dims).unsqueeze(0)
    parts = [_moments(part, dims) for part in x.split(block, dim)] if x.shape[dim] else []
    nothing = x.new_zeros([2, *(1 if d in dims else n for d, n in enumerate(x.shape))])
    parts += [nothing] * (count - len(parts))
    return torch.stack(parts) if parts else nothing.new_zeros([0, *nothing.shape])


def _moments(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    mean = torch.mean(x, dims, keepdim=True)
    centred = x - mean
    return torch.stack([mean, (centred * centred).sum(dims, keepdim=True)])


def block_merge(moments: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, 2, ...] moments of blocks with `counts` elements to (mean, sum of squared differences) of all of them.

    The sum of squares is that within the blocks plus that of the blocks' means (Chan, Golub & LeVeque 1983).
    """
    means, squares = moments.unbind(1)
    if len(set(counts)) == 1:
        mean = means.mean(0)
        apart = means - mean
        return mean, (apart * apart).sum(0) * counts[0] + squares.sum(0)
    weights = means.new_tensor(counts).view(-1, *[1] * (means.ndim - 1))
    mean = (means * weights).sum(0) / sum(counts)
    apart = means - mean
    return mean, (apart * apart * weights).sum(0) + squares.sum(0)


def _last(dtype: torch.dtype, largest: bool) -> Any:
    """The value that sorts last: torch sorts NaN above all numbers."""
    if largest:
        return lowest(dtype)
    return float("nan") if dtype.is_floating_point else highest(dtype)


def over_blocks(
    function: Callable[..., Any], places: list[int | None], made: list[int | None], operands: list[Any], *numbers: Any
) -> Any:
    """Call a function on each of the rank's blocks.

    Operand i has the blocks as dim `places[i]`; None: every call gets all of it. Result j is stacked as dim `made[j]`;
    None: it is added up.
    """
    count = next(t.shape[p] for t, p in zip(operands, places, strict=True) if p is not None)
    found = []
    for i in range(count):
        parts = [t if p is None else t.select(p, i) for t, p in zip(operands, places, strict=True)]
        result = function(*parts, *numbers)
        found.append(result if isinstance(result, tuple) else (result,))
    joined = [
        sum(parts[1:], parts[0]) if p is None else torch.stack(parts, p)
        for parts, p in zip(zip(*found, strict=True), made, strict=True)
    ]
    return joined[0] if len(joined) == 1 else tuple(joined)
