"""Look-ups in a dim of which a rank holds some indices; an index that it does not hold gives zero.

The sum of the ranks' results is the result of the look-up in the whole dim (masked local access, as Megatron-LM looks
up a vocabulary-parallel embedding: Shoeybi et al. 2019).
"""

from __future__ import annotations

from typing import Any

import torch

from .indices import Runs, global_index, local_place, local_places

# The error text of compiled code, which cannot say which index it is.
OUT_OF_RANGE = "meshfuse: an index is out of range"


class IndexOutOfRange(IndexError):
    """An index that the dim does not have. `index` is the tensor that it was in, None for a single number."""

    def __init__(self, value: int, low: int, size: int, index: torch.Tensor | None = None):
        super().__init__(f"index {value} of a dim of size {size}")
        self.value, self.low, self.size, self.index = value, low, size, index


def checked(index: torch.Tensor, size: int) -> torch.Tensor:
    """The indices as int64. Raises IndexOutOfRange unless all are from 0 to size - 1.

    On a GPU, and in code that is being traced, the kernel asserts it, as torch's own look-ups do, so that the host does
    not wait.
    """
    if index.numel() and not index.is_meta:
        low, high = torch.aminmax(index)
        if not index.is_cpu or torch._is_functional_tensor(index):
            torch._assert_async((low >= 0) & (high < size), OUT_OF_RANGE)
        elif not (int(low) >= 0 and int(high) < size):
            raise IndexOutOfRange(int(low if low < 0 else high), 0, size, index)
    return index.long()


def checked_place(index: int, size: int) -> int:
    """One index counted from the front, a negative one being counted from the end. Raises IndexOutOfRange."""
    if not -size <= index < size:
        raise IndexOutOfRange(index, -size, size)
    return index % size


def _sized(n: int, dim: int, ndim: int) -> list[int]:
    return [n if d == dim else 1 for d in range(ndim)]


def take(x: torch.Tensor, index: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.take_along_dim` of the indices in `runs`, zero for the others; all dims but `dim` broadcast."""
    places, inside = local_places(index, runs)
    if x.shape[dim] == 0:
        x = x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
    return torch.where(inside, torch.take_along_dim(x, places, dim), torch.zeros((), dtype=x.dtype, device=x.device))


def take_rows(x: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """The indices in `runs` of one dim of a whole tensor."""
    return x.index_select(dim, global_index(runs, x.device))


def index_select(x: torch.Tensor, index: torch.Tensor, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.index_select` of the indices in `runs`, zero for the others."""
    places, inside = local_places(index.reshape(-1), runs)
    if x.shape[dim] == 0:
        return x.new_zeros([len(places) if d == dim else n for d, n in enumerate(x.shape)])
    return x.index_select(dim, places).masked_fill(~inside.reshape(_sized(-1, dim, x.ndim)), 0)


def select(x: torch.Tensor, index: int, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.select` where the rank holds the index, zeros elsewhere."""
    place = local_place(index, runs)
    return x.new_zeros([n for d, n in enumerate(x.shape) if d != dim]) if place is None else x.select(dim, place)


def embedding(index: torch.Tensor, weight: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Rows of a table of which the rank holds the rows in `runs`; zeros for the others."""
    return index_select(weight, index, 0, runs).reshape(*index.shape, weight.shape[1])


def limit_norm(rows: torch.Tensor, max_norm: float, norm_type: float) -> torch.Tensor:
    """Rows whose norm is above `max_norm` scaled down to it, with torch's 1e-7 in the divisor."""
    norm = torch.linalg.vector_norm(rows, norm_type, -1, keepdim=True)
    return torch.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows)


def scatter(x: torch.Tensor, index: torch.Tensor, src: Any, dim: int, runs: Runs) -> torch.Tensor:
    """`torch.scatter` into the part of a dim that the rank holds; writes to other parts are left out."""
    places, inside = local_places(index, runs)
    n = x.shape[dim]
    spare = x.new_zeros([1 if d == dim else size for d, size in enumerate(x.shape)])
    source = src.to(x.dtype) if isinstance(src, torch.Tensor) else src
    return torch.cat([x, spare], dim).scatter(dim, torch.where(inside, places, n), source).narrow(dim, 0, n)


def triu(x: torch.Tensor, diagonal: int, rows: Runs, columns: Runs) -> torch.Tensor:
    """The upper triangle of a matrix, of which the rank holds these rows and columns."""
    row, column = global_index(rows, x.device), global_index(columns, x.device)
    return x.masked_fill(column - row[:, None] < diagonal, 0)
