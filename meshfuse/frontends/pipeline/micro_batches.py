"""A batch in parts along its first dim."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, SourceLine, user_error


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The arguments of a step in parts, and each one's share of the batch's rows."""

    parts: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    shares: tuple[float, ...]


def micro_batches(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, cut: Collection[int], line: SourceLine
) -> MicroBatches:
    """Cut all tensors whose first dim is that of the batch; everything else goes to all parts.

    cut: the places, among the leaves, of arguments that `inputs` cuts along their first dim: such are of the batch.
        Where there are none, the first tensor says how many rows there are.

    Sizes differ by at most one row. Raises ArgumentError for fewer rows than parts.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    first = [i for i in tensors if i in cut] or tensors
    if not first:
        raise user_error("step: arguments", "no tensor", "a batch", "", line, ArgumentError)
    rows = leaves[first[0]].shape[0]
    if rows < count:
        raise user_error(
            f"step: {count} micro-batches of a batch", f"{rows} row{'s' if rows != 1 else ''}", f"at least {count}",
            "Take fewer micro-batches, or a larger batch.", line, ArgumentError,
        )  # fmt: skip
    wrong = [i for i in first if leaves[i].shape[0] != rows and i in cut]
    if wrong:
        raise user_error("step: arguments of the batch", f"{leaves[wrong[0]].shape[0]} and {rows} rows", "equally many",
                         "", line, ArgumentError)  # fmt: skip
    chosen = [i for i in tensors if leaves[i].shape[0] == rows]
    pieces = {i: torch.tensor_split(leaves[i], count) for i in chosen}
    parts = [[pieces[i][n] if i in pieces else leaf for i, leaf in enumerate(leaves)] for n in range(count)]
    shares = tuple(pieces[first[0]][n].shape[0] / rows for n in range(count))
    return MicroBatches(tuple(pytree.tree_unflatten(part, tree) for part in parts), shares)
